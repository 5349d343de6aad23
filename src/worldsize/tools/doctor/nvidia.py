"""Room: what nvidia-smi prints, as values: health of each GPU, how they are connected. Pure but for the asking."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import WorldsizeError
from worldsize.launch import shell

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIELDS = (
    "index", "name", "driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit",
    "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "memory.total", "memory.used",
    "utilization.gpu",
)  # fmt: skip
_ASKED = {
    "query": ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"),
    "topo": ("nvidia-smi", "topo", "-m"),
    "nvlink": ("nvidia-smi", "nvlink", "-s"),
}
_LIMIT_S = 20.0

REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the reasons for a lower clock that are no choice of anybody; the others are idleness and settings."""
HARDWARE = 0x8 | 0x40 | 0x80

_LINK = re.compile(r"^\s*Link \d+: ([0-9.]+) GB/s", re.MULTILINE)
_GPU_LINE = re.compile(r"^GPU (\d+):", re.MULTILINE)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Clocks are in MHz, memory in MiB, temperature in °C, power in W; None: it does not say."""

    index: int
    name: str
    driver: str
    clock: float | None = None
    clock_max: float | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    reasons: int = 0
    uncorrected: float | None = None
    pending: bool = False
    pcie: int | None = None
    width: float | None = None
    width_max: float | None = None
    memory: float | None = None
    memory_used: float | None = None
    busy: float | None = None

    @property
    def slowed(self) -> list[str]:
        """Why its clock is lower than it could be, in words."""
        return [word for bit, word in REASONS.items() if self.reasons & bit]


def ask(environ: Mapping[str, str]) -> dict[str, str]:
    """What nvidia-smi prints of each kind; nothing where it is not there, "error" where it fails."""
    found: dict[str, str] = {}
    for kind, argv in _ASKED.items():
        try:
            done = shell.call(argv, environ, timeout=_LIMIT_S)
        except WorldsizeError as error:
            return found if "cannot be started" in error.what else {**found, "error": str(error)}
        if done.code and kind == "query":
            return {"error": (done.out + done.err).strip() or f"exit code {done.code}"}
        found[kind] = done.out
    return found


def gpus(text: str) -> list[Gpu]:
    """The GPUs of a query; lines of another shape are passed over."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [_gpu(row) for row in rows if len(row) == len(_FIELDS) and row[0].isascii() and row[0].isdigit()]


def links(text: str) -> dict[int, float]:
    """GPU -> GB/s in one direction over all its active NVLinks, from `nvidia-smi nvlink -s`."""
    marks = [(int(found[1]), found.end()) for found in _GPU_LINE.finditer(text)]
    ends = [*(start for _, start in marks), len(text)][1:]
    parts = zip(marks, ends, strict=False)
    sums = {index: sum(map(_speed, _LINK.findall(text[start:end]))) for (index, start), end in parts}
    return {index: speed for index, speed in sums.items() if speed}


def topology(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> how they are connected: NV18, PIX, PXB, PHB, NODE, SYS; from `nvidia-smi topo -m`."""
    rows = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    heads = next(([word for word in row if word.startswith("GPU") and word[3:].isdigit()] for row in rows if row), [])
    found: dict[tuple[int, int], str] = {}
    for row in rows[1:]:
        if row and row[0] in heads:
            cells = zip(heads, row[1 : len(heads) + 1], strict=False)
            found |= {(int(row[0][3:]), int(head[3:])): cell for head, cell in cells if cell != "X"}
    return found


def _gpu(row: list[str]) -> Gpu:
    index, name, driver, *rest = row
    clock, most, heat, power, limit, reasons, ecc, pending, pcie, width, widest, memory, used, busy = rest
    return Gpu(
        int(index), name, driver, _number(clock), _number(most), _number(heat), _number(power), _number(limit),
        int(reasons, 16) if re.fullmatch("0x[0-9a-fA-F]+", reasons) else 0, _number(ecc), pending.lower() == "yes",
        int(value) if (value := _number(pcie)) is not None else None, _number(width), _number(widest),
        _number(memory), _number(used), _number(busy),
    )  # fmt: skip


def _speed(text: str) -> float:
    return _number(text) or 0.0


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text, re.ASCII) else None
