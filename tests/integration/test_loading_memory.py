"""A rank that goes on reads what it holds: memory while loading is little more than its own state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import worldsize as ws
from worldsize.runtime.sharded import local
from worldsize.testing.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

WIDTH, LAYERS = 2048, 24
"""400 MB of parameters, 1.2 GB with AdamW's state: some 60 MB are the interpreter's own, whatever the size."""


class Net(nn.Sequential):
    """Wide layers in a row."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)))


def resident(kind: str) -> int:
    """Bytes: VmRSS, now, or VmHWM, the most since it was reset."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def warmed(folder: Path, strategy: str) -> tuple[int, int]:
    """The second step, in a process that has imported what saving and loading import."""
    for duration in ("1st", "2st"):
        train(folder / f"small-{strategy}", strategy, duration, width=8)
    return train(folder, strategy, "2st")


def train(folder: Path, strategy: str, duration: str, width: int = WIDTH) -> tuple[int, int]:
    """One step more. Returns how far memory rose while the state was loaded, and how large this rank's state is."""
    run = ws.Run(folder, global_batch=4, micro_batch=2, duration=duration, strategy=strategy, device="cpu", precision="fp32",
                 saving=ws.Saving(every=None))  # fmt: skip
    model = run.model(lambda: Net(width), init="meta")
    optimizer = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-4, foreach=False), model)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    placed, before = sum(_bytes(value) for value in model.parameters()), resident("VmRSS")
    rose = own = 0
    for step in run.steps(torch.utils.data.TensorDataset(torch.ones(8, width))):
        rose = resident("VmHWM") - before + placed
        state = [value for each in optimizer.state.values() for value in each.values() if value.dim()]
        own = placed + sum(_bytes(value) for value in state)
        for (x,) in step.micro_batches:
            step.backward(model(x).square().mean(1))
        step.update()
    return rose, own


def _bytes(value: Tensor) -> int:
    part = local(value)
    return part.numel() * part.element_size()


@pytest.mark.matrix
@pytest.mark.parametrize("reader", ["fsdp", "ddp", "single"])
def test_loading_needs_little_more_than_what_a_rank_holds(reader: str, tmp_path: Path) -> None:
    """At most 1.2 times, parameters and optimizer together, whoever wrote it."""
    run_ranks(train, 2, tmp_path, "fsdp", "1st")
    for rose, own in run_ranks(warmed, 1 if reader == "single" else 2, tmp_path, reader):
        assert own > 6e8
        assert rose <= 1.2 * own, f"{rose / own:.2f} times {own / 1e6:.0f} MB"
