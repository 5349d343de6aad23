"""Evaluation counts each sample once at any world size."""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import worldsize as ws
from tests.integration.program import Net, may_stop
from tests.pools import pool
from tests.train import small
from worldsize.checkpoint import listing
from worldsize.errors import DataError, LaunchError, StepError
from worldsize.runtime import signals

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 3), ("ddp", 4), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)]


def look(folder: Path, layout: str, length: int) -> tuple[dict[str, float], list[float], list[bool]]:
    """Scores and outputs over this many samples, before any step; and who is in training mode afterwards."""
    run = small.make(folder, strategy=layout)
    model = run.model(Net)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, torch.arange(length))

    def score(batch: Any) -> dict[str, Any]:
        out = model(batch[0])
        return {
            "first": out[:, 0], "count": (torch.ones(len(out)).sum(), 1), "nothing": (0.0, 0),
            "number": batch[1].double(), "noise": torch.rand(len(out), dtype=torch.float64),
        }  # fmt: skip

    scores = run.evaluate(score, data)
    outputs = run.predict(lambda batch: batch[1][:, None] * 1.0, data)
    run.close()
    return scores, outputs.flatten().tolist(), [module.training for module in model.modules()]


@pytest.mark.parametrize("length", [7, 1])
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_scores_do_not_depend_on_the_layout(tmp_path: Path, layout: str, ranks: int, length: int) -> None:
    """B064: seven samples, and one, on up to four ranks; random numbers included."""
    expected = pool(1).run(look, tmp_path / "a", "single", length)[0][0]
    for scores, outputs, training in pool(ranks).run(look, tmp_path / "b", layout, length):
        assert math.isnan(scores.pop("nothing"))
        assert scores == pytest.approx({k: v for k, v in expected.items() if k != "nothing"}, rel=1e-12)
        assert scores["number"] == pytest.approx((length - 1) / 2)
        assert scores["count"] * math.ceil(length / 2) == pytest.approx(length)
        assert outputs == list(range(length))
        assert all(training)


def wrong(folder: Path, what: str) -> None:
    """An evaluation that cannot be counted."""
    run = small.make(folder)
    model, _ = small.parts(run)
    wanted: dict[str, Any] = {
        "mean": lambda batch: {"loss": small.errors(model, batch).mean()},
        "number": lambda _: {"loss": 0.5},
        "empty": lambda batch: {"loss": small.errors(model, batch)},
    }
    run.evaluate(wanted[what], small.data(0 if what == "empty" else 7))


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("mean", StepError, r"'loss' must give one number a sample, or \(sum, n\).*\(\) for 2 samples"),
        ("number", StepError, r"'loss' must give one number a sample.*float for 2 samples"),
        ("empty", DataError, "known length that is not empty.*length 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path: Path, what: str, error: type[Exception], words: str) -> None:
    """A mean over a micro-batch would weigh the ragged one as a whole one."""
    with pytest.raises(error, match=words):
        pool(1).run(wrong, tmp_path, what)


def inline(folder: Path) -> list[float]:
    """Data sets made at the call, one after another."""
    run = small.make(folder)
    model, _ = small.parts(run)
    found = []
    for number in range(12):
        data = TensorDataset(torch.full((3, 1), float(number)))
        found.append(run.evaluate(lambda batch: {"x": batch[0][:, 0]}, DataLoader(data, batch_size=2))["x"])
    del model
    return found


def test_data_made_at_the_call_is_not_taken_for_another(tmp_path: Path) -> None:
    """An id may come again after its object has gone."""
    assert pool(1).run(inline, tmp_path)[0] == list(range(12))


def draws(folder: Path) -> list[float]:
    """What the loop body draws after an evaluation, and a final one on the same data after the loop."""
    run = small.make(folder)
    model, _ = small.parts(run)
    data, found = small.data(7), []
    for _step in small.steps(run, model):
        run.evaluate(lambda batch: {"x": torch.rand(len(batch[0]))}, data)
        found.append(float(torch.rand(1)))
    found.append(run.evaluate(lambda batch: {"x": batch[1]}, data)["x"])
    return found


def test_an_evaluation_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    """API 10: the body's own draws are equal on all ranks and layouts; and data may be evaluated after the loop too."""
    alone = pool(1).run(draws, tmp_path / "a")[0]
    for found in pool(2).run(draws, tmp_path / "b"):
        assert found == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) == len(alone)


def ended(folder: Path) -> tuple[int, str]:
    """Wishes to end in its second step, is stopped in the evaluation after it, and is started again."""
    for attempt in range(2):
        signals.forget()  # as in a new process
        run = small.make(folder)
        model, _ = small.parts(run)
        with may_stop():
            for step in run.steps(small.data()):
                small.send(step, model)
                if step.index == 1 and attempt == 0:
                    run.stop("enough")
                step.update()
                if step.index == 1:
                    if attempt == 0:
                        small.stop()
                    run.evaluate(lambda batch: {"loss": small.errors(model, batch)}, small.data(7))  # noqa: B023
        run.close()
    return step.index, run.result["done"]


def test_an_end_is_remembered_through_a_stop(tmp_path: Path) -> None:
    """What follows the last step is done again, and no step more."""
    assert pool(1).run(ended, tmp_path)[0] == (1, "enough")


def judged(folder: Path, end: str) -> None:
    """An attempt whose second step is the best, which its evaluation tells, and what ends the attempt there."""
    signals.forget()  # as in a new process
    run = small.make(folder, saving=ws.Saving(every="1st", keep_last=1))
    model, _ = small.parts(run)
    with may_stop():
        for step in small.steps(run, model):
            if step.index == 1 and end == "stop in the evaluation" and run.comm.rank == 0:
                small.stop()
            run.evaluate(lambda batch: {"loss": small.errors(model, batch)}, small.data(7))
            run.best(-abs(step.index - 1))
            if step.index == 1 and end == "stop after it":
                small.stop()
            if step.index == 2 and end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
    run.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("again", ["stop in the evaluation", "stop after it", "killed", ""])
def test_the_best_checkpoint_stays_where_a_stop_came_before_it_was_known(
    tmp_path: Path, ranks: int, again: str
) -> None:
    """It is committed before its evaluation is over, and marked once the next attempt has done that again."""
    pool(ranks).run(judged, tmp_path, "stop in the evaluation")
    assert listing.look(tmp_path).best == {1}
    with suppress(LaunchError):
        pool(ranks).run(judged, tmp_path, again)
    pool(ranks).run(judged, tmp_path, "")
    found = listing.look(tmp_path)
    assert [entry.step for entry in found.entries] == [2, 6]
    assert found.best == {2}
