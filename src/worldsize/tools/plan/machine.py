"""Room: GPUs by name: their memory, and what of it is never a training's. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from worldsize.errors import ConfigError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as it is asked for.
        memory: bytes that CUDA says it has.
        workspace: bytes of cuBLAS for each thread that computes (forward and backward are two), inside torch's allocator.
    """

    name: str
    memory: int
    workspace: int = 2 * 4 * MIB + 128 * 1024


_HOPPER = 32 * MIB
KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4-16g", int(14.6 * GIB)),
        Gpu("v100-16g", int(15.7 * GIB)),
        Gpu("v100-32g", int(31.7 * GIB)),
        Gpu("rtx3090-24g", int(23.6 * GIB)),
        Gpu("rtx4090-24g", int(23.5 * GIB)),
        Gpu("a10-24g", int(22.0 * GIB)),
        Gpu("l4-24g", int(22.0 * GIB)),
        Gpu("l40s-48g", int(44.4 * GIB)),
        Gpu("a6000-48g", int(47.4 * GIB)),
        Gpu("a100-40g", int(39.4 * GIB)),
        Gpu("a100-80g", int(79.1 * GIB)),
        Gpu("h100-80g", int(79.1 * GIB), _HOPPER),
        Gpu("h100-94g", int(93.1 * GIB), _HOPPER),
        Gpu("h200-141g", int(139.8 * GIB), _HOPPER),
        Gpu("b200-180g", int(178.3 * GIB), _HOPPER),
    )
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(g|gb|gib)", re.IGNORECASE)


def find(text: str) -> Gpu:
    """The GPU of that name, or any of so much memory: "h100-80g", "24GB", "22.5GiB".

    Raises:
        ConfigError: neither; with the known ones.
    """
    name = text.strip().lower()
    if name in KNOWN:
        return KNOWN[name]
    size = _SIZE.fullmatch(name)
    if size and float(size[1]) > 0:
        unit = 10**9 if size[2].lower() == "gb" else GIB
        return Gpu(name, int(float(size[1]) * unit), _HOPPER)
    alike = sorted(each for each in KNOWN if each.startswith(f"{name.partition('-')[0]}-"))
    raise ConfigError(
        f"GPU {text!r} is not known",
        do=f"give its memory (80GiB), or one of {', '.join(alike or KNOWN)}",
    )


@dataclass(frozen=True, slots=True)
class Margin:
    """What a GPU must have beside the peak of the allocator before a layout is said to fit. Bytes, and shares of the peak.

    The figures are those of benchmarks/plan.py on H200s: context 824 MiB; reserved 3% to 25% above the peak. What is reserved
    can be given back when memory is short, so a layout between the two may run.

    Attributes:
        context: the CUDA context with torch's kernels, and cuBLAS, cuDNN beside the allocator.
        channel: buffers of NCCL, for each group of ranks.
        least: what is lost between the allocator's blocks at least.
        spread: what was at most.
        formula: where the peak was not traced but computed.
    """

    context: int = 850 * MIB
    channel: int = 400 * MIB
    least: float = 0.03
    spread: float = 0.25
    formula: float = 0.10

    def of(self, peak: int, groups: int, *, traced: bool) -> tuple[int, int]:
        """For one rank: the least, and what is surely enough."""
        fixed = self.context + self.channel * groups
        low, high = (
            fixed + int((share + (0.0 if traced else self.formula)) * peak) for share in (self.least, self.spread)
        )
        return low, high
