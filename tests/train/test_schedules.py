"""Learning-rate schedules move by themselves, and come back whatever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from tests.integration.program import may_stop
from tests.pools import pool
from tests.train import small
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.train.step import Step

STEPS = 6

KINDS: dict[str, Any] = {
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 1, 4], 0.5),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.CosineAnnealingLR(o, 4)], [2]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.9)]
    ),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 1 / (step + 1)),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, STEPS, 2.0),
    "StepLR": lambda o: lrs.StepLR(o, 2),
}


def rates(folder: Path, kind: str, stop_after: int | None = None, every: str = "step") -> dict[int, float]:
    """The rate that each step is made with."""
    run = small.make(folder)
    model, optimizer = small.parts(run)
    run.schedule(optimizer, KINDS[kind], every=every)
    found = {}
    with may_stop():
        for step in run.steps(small.data()):
            found[step.index] = optimizer.param_groups[0]["lr"]
            small.send(step, model)
            step.update()
            if step.index + 1 == stop_after:
                small.stop()
    return found


def by_hand(kind: str) -> list[float]:
    """The rates of torch alone."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    schedule = KINDS[kind](optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_goes_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    """The rates of torch alone, interrupted or not."""
    expected = dict(enumerate(by_hand(kind)))
    before = pool(1).run(rates, tmp_path, kind, 3)[0]
    after = pool(1).run(rates, tmp_path, kind)[0]
    assert sorted(after) == [3, 4, 5]
    assert before | after == pytest.approx(expected, rel=1e-12)


def test_a_schedule_may_move_once_an_epoch(tmp_path: Path) -> None:
    """After the step that ends it."""
    found = pool(1).run(rates, tmp_path, "StepLR", None, "epoch")[0]
    assert list(found.values()) == [0.1] * STEPS
    longer = pool(1).run(rates, tmp_path / "b", "LambdaLR", None, "epoch")[0]
    assert list(longer.values()) == pytest.approx([0.1] * 3 + [0.05] * 3)


def plateau(folder: Path, stop_after: int | None = None) -> dict[int, float]:
    """A schedule that the program moves itself, by a score that does not get better."""
    run = small.make(folder)
    model, optimizer = small.parts(run)
    schedule = run.schedule(optimizer, lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5), every=None)
    found: dict[int, float] = {}

    def after(step: Step) -> None:
        schedule.step(1.0)
        found[step.index] = optimizer.param_groups[0]["lr"]

    with may_stop():
        for step in small.steps(run, model):
            after(step)
            if step.index + 1 == stop_after:
                small.stop()
    return found


def test_a_schedule_of_the_program_own_comes_back(tmp_path: Path) -> None:
    """ReduceLROnPlateau, with its counts of bad steps."""
    straight = pool(1).run(plateau, tmp_path / "a")[0]
    before = pool(1).run(plateau, tmp_path / "b", 2)[0]
    assert before | pool(1).run(plateau, tmp_path / "b")[0] == straight
    assert len(set(straight.values())) == 3


def none(folder: Path) -> None:
    """No schedule."""
    small.train(folder)


def test_another_number_of_schedules_is_refused(tmp_path: Path) -> None:
    """With both numbers."""
    pool(1).run(rates, tmp_path, "StepLR", 3)
    with pytest.raises(CheckpointError, match=r"schedules are not those.*0 now, 1 before"):
        pool(1).run(none, tmp_path)
