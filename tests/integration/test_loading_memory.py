"""A rank that goes on reads what it holds: memory while loading is little more than its own state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    run = ws.Run(folder, global_batch=8, micro_batch=2, duration=duration, strategy=strategy, device="cpu", precision="fp32",
                 saving=ws.Saving(every=None))  # fmt: skip
    model = run.model(lambda: Net(width), init="meta")
    optimizer = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-4, foreach=False), model)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    placed, before = held(model, optimizer), resident("VmRSS")
    rose = own = 0
    for step in run.steps(torch.utils.data.TensorDataset(torch.ones(16, width))):
        rose = resident("VmHWM") - before + placed
        own = held(model, optimizer)
        for (x,) in step.micro_batches:
            step.backward(model(x).square().mean(1))
        step.update()
    return rose, own


def held(model: nn.Module, optimizer: Any) -> int:
    """Bytes of what a rank must have in order to train, each memory counted once.

    Its part of the parameters, or all of them where a strategy copies them to every rank (ddp, ZeRO-1 and 2), and of the
    optimizer's state; under ZeRO also DeepSpeed's partition that the optimizer moves, which is a second copy of parameters.
    """
    parts = getattr(optimizer, "_fragments", None)
    states = optimizer.state if parts is None else parts.base.state
    found = [value for each in states.values() for value in each.values() if value.dim()]
    for value in model.parameters():
        found += [value, *([] if parts is None else [parts.part(value).flat]), *_cut(value)]
    memories = [local(value.detach()).untyped_storage() for value in found]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


def _cut(value: nn.Parameter) -> list[Tensor]:
    """What ZeRO-3 has of a parameter."""
    return [vars(value)["ds_tensor"]] if hasattr(value, "ds_tensor") else []


ZERO = [("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero1", 4), ("zero3", 4)]


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("reader", "ranks"), [("fsdp", 2), ("ddp", 2), ("single", 1), *ZERO])
def test_loading_needs_little_more_than_what_a_rank_holds(reader: str, ranks: int, tmp_path: Path) -> None:
    """At most 1.2 times what a rank holds once it is loaded (`held`), whoever wrote it."""
    if reader.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    run_ranks(train, 2, tmp_path, "fsdp", "1st")
    for rose, own in run_ranks(warmed, ranks, tmp_path, reader, timeout=600):
        assert own > 4e8
        assert rose <= 1.2 * own, f"{rose / own:.2f} times {own / 1e6:.0f} MB"
