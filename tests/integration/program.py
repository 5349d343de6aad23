"""Room: one small training with everything in it that could depend on the layout, and what to compare of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import worldsize as ws
from worldsize.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

GLOBAL, MICRO, LENGTH = 48, 4, 202
"""12 micro-batches a step; the last step of an epoch has 10 samples: two micro-batches and a half."""
STEPS_PER_EPOCH = 5
ROOT = Path(__file__).parents[2]

LAYOUTS = ("single:1", *(f"{name}:{ranks}" for name in ("ddp", "fsdp") for ranks in (1, 2, 3, 4)))


def ranks_of(layout: str) -> int:
    """The number of ranks of "ddp:3"."""
    return int(layout.partition(":")[2])


class Net(nn.Module):
    """Batch normalisation, drop-out, and two blocks of one kind, so that FSDP has units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Three logits a sample."""
        x = torch.relu(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


class Block(nn.Module):
    """A residual unit with drop-out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(12, 12), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = x + self.drop(torch.tanh(self.inner(x)))
        return out


def samples(length: int = LENGTH) -> torch.utils.data.TensorDataset:
    """Three classes that a small net can tell apart, roughly."""
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(length, 6, generator=drawn, dtype=torch.float64)
    noise = torch.randn(length, 3, generator=drawn, dtype=torch.float64)
    target = (x[:, :3] * 2 + x[:, 3:] + noise).argmax(1)
    return torch.utils.data.TensorDataset(x.float(), target)


@dataclass(slots=True)
class Curve:
    """What a training did, step by step, and what it ended with."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)


def train(folder: Path, layout: str, **settings: Any) -> Curve:
    """The training on this rank, as far as it gets. Takes the settings of `Run`, and `stop_after`."""
    stop_after = settings.pop("stop_after", None)
    run = make_run(folder, layout, **settings)
    curve = Curve()
    with may_stop():
        work(run, curve, stop_after)
    run.close()
    return curve


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all these runs."""
    return torch.optim.AdamW(model.parameters(), 3e-3)


@contextmanager
def may_stop() -> Iterator[None]:
    """A stop on request ends the block, and nothing else does."""
    try:
        yield
    except SystemExit as left:
        if left.code != EXIT_STOPPED:
            raise


def make_run(folder: Path, layout: str, **settings: Any) -> ws.Run:
    """A run of this layout on the CPU."""
    defaults = {"duration": "2ep", "precision": "fp64", "seed": 3, "device": "cpu", "saving": ws.Saving(every=None)}
    return ws.Run(
        folder, global_batch=GLOBAL, micro_batch=MICRO, strategy=layout.partition(":")[0], **{**defaults, **settings}
    )


def work(
    run: ws.Run,
    curve: Curve,
    stop_after: int | None = None,
    period: int | None = None,
    kind: type[nn.Module] = Net,
    **how: Any,
) -> None:
    """Parts, loop and comparison of one run; the rate falls over the whole run, or swings with a period."""
    model = run.model(kind, **how)
    optimizer = run.optimizer(adamw, model, clip=0.5)
    run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, period or run.total_steps))
    average = run.average(model, 0.9)
    for step in run.steps(samples()):
        curve.rates[step.index] = optimizer.param_groups[0]["lr"]
        for x, y in step.micro_batches:
            step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        norm = step.update()
        assert norm is not None
        curve.losses[step.index], curve.norms[step.index] = float(step.loss), float(norm)
        curve.ids[step.index] = step.ids
        if stop_after is not None and step.index + 1 == stop_after:
            stop_softly()
    curve.weights = run.whole(model)
    with average.applied():
        curve.average = run.whole(model)


def stop_softly() -> None:
    """As if SIGTERM had come to this rank."""
    os.kill(os.getpid(), signal.SIGTERM)


def everyone(curves: list[Curve]) -> Curve:
    """One curve from those of all ranks: ids joined; the rest must be the same on each.

    Raises AssertionError where ranks saw different losses, or hold different weights.
    """
    first = curves[0]
    for other in curves[1:]:
        assert other.losses == first.losses
        assert other.rates == first.rates
        same(first.weights, other.weights)
        same(first.average, other.average)
    # Ranks that work on one share together are given the same samples.
    ids = {step: list(dict.fromkeys(number for curve in curves for number in curve.ids[step])) for step in first.ids}
    return Curve(first.losses, first.norms, first.rates, ids, first.weights, first.average)


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name}: {(value - right[name]).abs().max()}"


def close(expected: Curve, found: Curve, tolerance: float) -> None:
    """The numbers of `found` are those of `expected`, relatively, over the steps that `found` has; ids exactly."""
    for name in ("losses", "norms", "rates"):
        before, now = getattr(expected, name), getattr(found, name)
        for step, value in now.items():
            assert abs(value - before[step]) <= tolerance * abs(before[step]), f"{name} of step {step}"
    for step, ids in found.ids.items():
        assert ids == expected.ids[step], f"ids of step {step}"
    for name in ("weights", "average"):
        for key, tensor in getattr(found, name).items():
            _near(f"{name} {key}", tensor, getattr(expected, name)[key], tolerance)


def apart(expected: Curve, found: Curve) -> float:
    """The largest relative difference of a loss."""
    return max(
        abs(value - expected.losses[step]) / abs(expected.losses[step]) for step, value in found.losses.items()
    )


def _near(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def resume_all(folders: Mapping[int, Path], layout: str) -> dict[int, Curve]:
    """Go on in each folder to the end, one after another in the same processes."""
    return {step: train(folder, layout) for step, folder in folders.items()}


def die_inside(folder: Path, layout: str, step: int, micro: int) -> None:
    """SIGKILL to all ranks by rank 0, in its `micro`-th micro-batch of a step, when the step before is committed."""
    run = make_run(folder, layout, saving=ws.Saving(every="1st", synchronous=True))
    model = run.model(Net)
    optimizer = run.optimizer(adamw, model, clip=0.5)
    run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, run.total_steps))
    run.average(model, 0.9)
    for now in run.steps(samples()):
        for number, (x, y) in enumerate(now.micro_batches):
            now.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            if (now.index, number, run.comm.rank) == (step, micro, 0):
                os.killpg(0, signal.SIGKILL)
        now.update()


def endure(folder: Path, layout: str, duration: str) -> None:
    """The training as a program of its own that commits every step, to be killed and started again."""
    run = make_run(folder, layout, duration=duration, saving=ws.Saving(every="1st"))
    work(run, Curve(), period=20)


def linger(folder: Path, layout: str, waits: Mapping[str, float]) -> None:
    """Two epochs, each with an evaluation, as a program that says where it is and takes its time.

    Args:
        folder: the run folder.
        layout: strategy and ranks.
        waits: seconds by place: "warm-up", "step", "evaluation" (for each of its batches).
    """
    run = make_run(folder, layout, saving=ws.Saving(every="1st"))
    model = run.model(Net)
    optimizer = run.optimizer(adamw, model, clip=0.5)
    run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, run.total_steps))
    run.average(model, 0.9)
    say("warm-up", waits)

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        say("evaluation", waits)
        return {"right": model(batch[0]).argmax(1) == batch[1]}

    for step in run.steps(samples()):
        say("step", waits)
        for x, y in step.micro_batches:
            step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        step.update()
        if step.ends_epoch:
            run.log(run.evaluate(score, samples(240)))
            say(f"evaluated {step.index}", {})


def say(place: str, waits: Mapping[str, float]) -> None:
    """A line, and a rest."""
    sys.stdout.write(f"{place}\n")
    sys.stdout.flush()
    time.sleep(waits.get(place, 0.0))
