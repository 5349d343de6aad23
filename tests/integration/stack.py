"""Room: one small training that every layout can hold: a chain of blocks with a plan for tensor parts. No drop-out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import worldsize as ws
from tests.integration.program import Curve, may_stop, work
from worldsize.tools.trial import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "loopedbfs")
ONE = "single:1"
ZERO = tuple(f"zero{stage}" for stage in range(4))
GROUPS: dict[str, tuple[str, ...]] = {
    "data": ("ddp:2", "fsdp:2", "hsdp+replicas2:4"),
    "deepspeed": tuple(f"{stage}:2" for stage in ZERO),
    "horovod": ("horovod:2",),
    "tensor": ("tp2:2", "fsdp+tp2:4"),
    "pipeline": (*(f"pp2+schedule={name}:2" for name in SCHEDULES), "fsdp+pp2:4"),
}
EVERY = tuple(layout for group in GROUPS.values() for layout in group)
"""Each with the fewest ranks that show it."""
WIDE = "fsdp+tp2+pp2:8"
MORE = (
    *(f"{name}:{ranks}" for name in ("ddp", "fsdp", *ZERO, "horovod") for ranks in (1, 3, 4)),
    "hsdp+replicas1:2", "hsdp+replicas2:2", "tp4:4", "ddp+tp2:4", "ddp+pp2:4", "tp2+pp2:4",
    *(f"pp{ranks}+schedule={name}:{ranks}" for ranks in (3, 4) for name in SCHEDULES), WIDE,
)  # fmt: skip
"""What else there is on one to four ranks, and every axis at once on eight."""


class Stack(nn.Sequential):
    """A chain: so a pipeline can cut it; each block's two layers are a pair that can be split over ranks."""

    tp_plan: Mapping[str, str] = {"*.up": "colwise", "*.down": "rowwise"}

    def __init__(self) -> None:
        blocks = [Block() for _ in range(6)]
        super().__init__(nn.Linear(6, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 3))


class Block(nn.Module):
    """A residual unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def train(folder: Path, layout: str, **settings: Any) -> Curve:
    """The training on this rank, as far as it gets. Takes the settings of `Run`, and `stop_after`."""
    stop_after = settings.pop("stop_after", None)
    curve, laid = Curve(), Layout.parse(layout)
    how: dict[str, Any] = {axis: name for axis, name in laid.axes if axis == "schedule"}
    run = _run(folder, laid, settings)
    with may_stop():
        work(run, curve, stop_after, kind=Stack, **how)
        run.close()
    return curve


def resume_all(folders: Mapping[str, Path], layout: str) -> dict[str, Curve]:
    """Go on in each folder to the end, one after another in the same processes."""
    return {name: train(folder, layout) for name, folder in folders.items()}


def _run(folder: Path, layout: Layout, settings: Mapping[str, Any]) -> ws.Run:
    sizes = {axis: int(size) for axis, size in layout.axes if axis != "schedule"}
    defaults: dict[str, Any] = {"duration": "2ep", "micro_batch": 4, "precision": "fp64", "seed": 3, "device": "cpu"}
    return ws.Run(
        folder,
        global_batch=48,
        strategy=layout.strategy or None,
        saving=ws.Saving(every=None),
        **{**defaults, **sizes, **settings},
    )
