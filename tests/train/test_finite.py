"""Losses and gradients that are not finite: what is named, and what each policy makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.integration.program import may_stop
from tests.pools import pool
from tests.train import small
from worldsize.checkpoint import load, manifest
from worldsize.errors import StepError
from worldsize.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BAD = 2
"""The step with the bad sample, which is its own id."""


class Two(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        found: torch.Tensor = self.second(torch.tanh(self.first(x))).squeeze(1)
        return found


def spoil(name: str, armed: list[bool], model: nn.Module) -> None:
    """From now on a parameter's gradient gets a NaN while `armed`."""
    value = dict(model.named_parameters())[name]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.index_fill(0, torch.tensor([0]), float("nan")) if armed[0] else gradient

    value.register_hook(hook)


def train(folder: Path, how: str, *, clip: float | None = None, once: bool = True, **settings: Any) -> dict[str, Any]:
    """A training whose step `BAD` has a loss or a gradient that is none: "loss", or a parameter's name."""
    run = small.make(folder, **{"strategy": "ddp", "duration": "6st", "saving": small.OFTEN, **settings})
    model = run.model(Two)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model, clip=clip)
    armed, seen, losses, error = [False], [], {}, ""
    if how != "loss":
        spoil(how, armed, model)
    try:
        for step in run.steps(small.data()):
            bad = step.index == BAD and not (once and BAD in seen)
            armed[0] = bad
            for batch in step.micro_batches:
                found = small.errors(model, batch)
                step.backward(
                    found * float("inf") if bad and how == "loss" and run.comm.rank == run.comm.size - 1 else found
                )
            step.update()
            seen.append(step.index)
            losses[step.index] = float(step.loss)
    except StepError as caught:
        error = str(caught)
    finally:
        run.close()
    weights = run.whole(model) if not error else {}
    return {"seen": seen, "losses": losses, "error": error, "weights": weights}


both = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])


@both
def test_a_loss_that_is_not_finite_stops_the_run_and_is_named(tmp_path: Path, ranks: int) -> None:
    """By default: the step, its samples, the first parameter; what is committed is from before it."""
    for found in pool(ranks).run(train, tmp_path / "run", "loss"):
        assert "the loss of step 2 is not finite" in found["error"]
        assert "loss inf; first in the gradient of 'model.first.weight'; samples " in found["error"]
    assert manifest.step_of(manifest.committed(tmp_path / "run")[-1]) == BAD


def test_a_gradient_is_named_where_the_norm_is_known(tmp_path: Path) -> None:
    """With clipping, in its own step; not the first parameter, but the first whose gradient is none."""
    (found,) = pool(1).run(train, tmp_path / "run", "second.weight", clip=1.0)
    assert "the gradient of step 2 is not finite" in found["error"]
    assert "first in the gradient of 'model.second.weight'" in found["error"]
    assert found["seen"] == [0, 1]


def test_weights_that_are_not_finite_are_never_committed(tmp_path: Path) -> None:
    """Without clipping the loss shows it a step later; a commit in between looks at the weights."""
    (found,) = pool(1).run(train, tmp_path / "run", "second.weight")
    assert (
        "weights of step 3 are not finite, and were not committed. Found: the weights 'model.second.weight'"
        in found["error"]
    )
    assert manifest.step_of(manifest.committed(tmp_path / "run")[-1]) == BAD


@both
def test_skip_leaves_the_update_out_and_goes_on(tmp_path: Path, ranks: int) -> None:
    """The weights are those of a training without that step's update."""
    for found in pool(ranks).run(train, tmp_path / "run", "first.bias", nonfinite="skip"):
        assert found["error"] == ""
        assert found["seen"] == [0, 1, 2, 3, 4, 5]
        assert all(torch.isfinite(value).all() for value in found["weights"].values())
    assert small.numbers(tmp_path / "run", "loss").keys() == set(range(6))


@both
@pytest.mark.parametrize("how", ["loss", "first.bias"])
def test_rewind_goes_back_and_skips_it_the_second_time(tmp_path: Path, ranks: int, how: str) -> None:
    """To the last commit; the curve is that of a training that skipped the step."""
    often: dict[str, Any] = {"saving": ws.Saving(every="2st", synchronous=True), "once": False}
    skipped = pool(ranks).run(train, tmp_path / "a", how, nonfinite="skip", **often)
    for found, other in zip(
        pool(ranks).run(train, tmp_path / "b", how, nonfinite="rewind", **often), skipped, strict=True
    ):
        assert found["seen"] == [0, 1, 2, 2, 3, 4, 5], found
        finite = {step: loss for step, loss in found["losses"].items() if step != BAD}
        assert finite == {step: loss for step, loss in other["losses"].items() if step != BAD}
        assert found["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(value, other["weights"][name]) for name, value in found["weights"].items())


def test_what_does_not_come_again_is_not_skipped(tmp_path: Path) -> None:
    """A fault of the machine: after going back, the curve is the undisturbed one."""
    (found,) = pool(1).run(
        train, tmp_path / "a", "loss", nonfinite="rewind", saving=ws.Saving(every="1st", synchronous=True)
    )
    (clean,) = pool(1).run(train, tmp_path / "b", "loss", nonfinite="ignore", once=False, duration="2st")
    assert found["error"] == ""
    assert len(found["losses"]) == 6
    assert [found["losses"][step] for step in (0, 1)] == [clean["losses"][step] for step in (0, 1)]


def test_rewind_needs_a_commit(tmp_path: Path) -> None:
    """It says so where there is none."""
    (found,) = pool(1).run(train, tmp_path / "run", "loss", nonfinite="rewind", saving=ws.Saving(every=None))
    assert "there is no commit to go back to" in found["error"]


def late(folder: Path, attempts: list[str], **settings: Any) -> dict[str, Any]:
    """A training that looks at numbers as late as on a GPU. The last rank has a loss that is none, once.

    Args:
        folder: the run's.
        attempts: what each of them does after that step, in words; "clean" has none such.
        settings: of the run.
    """
    seen: list[list[int]] = []
    for what in attempts:
        signals.forget()  # as in a new process
        run = small.make(folder, **{"strategy": "ddp", "nonfinite": "rewind", **settings})
        run._engine.guard._device = torch.device("cuda")
        model, _ = small.parts(run)
        seen.append([])
        with may_stop():
            for step in run.steps(small.data()):
                bad = step.index == BAD and what != "clean" and not any(BAD in steps for steps in seen)
                for batch in step.micro_batches:
                    worse = float("inf") if bad and run.comm.rank == run.comm.size - 1 else 1.0
                    step.backward(small.errors(model, batch) * worse)
                step.update()
                seen[-1].append(step.index)
                if bad:
                    AFTER[what](run, model)
        run.close()
    return {"seen": seen, "weights": run.whole(model), **run.result}


def evaluated(run: ws.Run, model: nn.Module) -> None:
    """An evaluation in which a stop comes to one rank."""
    if run.comm.rank == 0:
        small.stop()
    run.evaluate(lambda batch: {"loss": small.errors(model, batch)}, small.data(7))


AFTER: dict[str, Callable[[ws.Run, nn.Module], None]] = {
    "nothing": lambda _, __: None,
    "end": lambda run, _: run.stop("no better loss"),
    "one rank's end": lambda run, _: run.stop("no better loss") if run.comm.rank == 0 else None,
    "stop": lambda _, __: small.stop(),
    "stop in an evaluation": evaluated,
}
"""What a program does after its bad step."""


@pytest.mark.parametrize(
    ("what", "every", "seen"),
    [
        ("nothing", "1st", [[0, 1, 2, 2, 3, 4, 5]]),
        ("nothing", "2st", [[0, 1, 2, 3, 2, 3, 4, 5]]),
        ("end", "2st", [[0, 1, 2, 2, 3, 4, 5]]),
        ("one rank's end", "2st", [[0, 1, 2, 3, 2, 3, 4, 5]]),
        ("stop", "2st", [[0, 1, 2], [2, 3, 4, 5]]),
        ("stop in an evaluation", "2st", [[0, 1, 2], [2, 3, 4, 5]]),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_step_that_is_seen_late_is_never_committed(
    tmp_path: Path, ranks: int, what: str, every: str, seen: list[list[int]]
) -> None:
    """Neither by a commit that follows it, nor by a stop: the training goes back first, and nothing of that step stays."""
    if (ranks, what) == (1, "one rank's end"):
        seen = [[0, 1, 2, 2, 3, 4, 5]]
    often = ws.Saving(every=every, synchronous=True)
    clean = pool(ranks).run(late, tmp_path / "clean", ["clean"], saving=often)
    attempts = [what, "nothing"][: len(seen)]
    for found, other in zip(pool(ranks).run(late, tmp_path / "run", attempts, saving=often), clean, strict=True):
        assert found["seen"] == seen
        assert (found["step"], found["done"]) == (6, "finished")
        assert all(torch.equal(value, other["weights"][name]) for name, value in found["weights"].items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_step_that_is_the_last_is_seen_too(tmp_path: Path, ranks: int) -> None:
    """The training goes back, and ends as if it had not been."""
    often: dict[str, Any] = {"saving": ws.Saving(every="2st", synchronous=True), "duration": "3st"}
    clean = pool(ranks).run(late, tmp_path / "clean", ["clean"], **often)
    for found, other in zip(pool(ranks).run(late, tmp_path / "run", ["nothing"], **often), clean, strict=True):
        assert found["seen"] == [[0, 1, 2, 2]]
        assert all(torch.equal(value, other["weights"][name]) for name, value in found["weights"].items())
    assert manifest.step_of(manifest.committed(tmp_path / "run")[-1]) == BAD + 1


def tailed(folder: Path) -> tuple[list[int], list[int]]:
    """Stopped in the evaluation before its bad step, then started again: what is evaluated, and what counts in the end."""
    done: list[int] = []
    for attempt in range(2):
        signals.forget()  # as in a new process
        run = small.make(folder, strategy="ddp", nonfinite="rewind", saving=ws.Saving(every=None))
        model, _ = small.parts(run)
        kept, armed = run.keep(evaluated=[]), [True]
        with may_stop():
            for step in run.steps(small.data()):
                bad, armed[0] = step.index == BAD and armed[0], armed[0] and step.index != BAD
                for batch in step.micro_batches:
                    step.backward(small.errors(model, batch) * (float("inf") if bad else 1.0))
                step.update()
                if step.index == BAD - 1 and attempt == 0 and run.comm.rank == 0:
                    small.stop()
                run.evaluate(lambda batch: {"loss": small.errors(model, batch)}, small.data(7))  # noqa: B023
                done.append(step.index)
                kept.evaluated = [*kept.evaluated, step.index]
        run.close()
    return done, kept.evaluated


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_stop_interrupted_is_done_again_after_going_back_too(tmp_path: Path, ranks: int) -> None:
    """The state that it goes back to is from before what follows the step; once that is done, it is over."""
    for done, kept in pool(ranks).run(tailed, tmp_path / "run"):
        assert done == [0, 1, 2, 1, 2, 3, 4, 5]
        assert kept == [0, 1, 2, 3, 4, 5]
    assert load.read_train(manifest.committed(tmp_path / "run")[-1])["progress"]["tail"] is None
