"""What is made of a run folder: queue, attempts that told nothing, failures without a launcher of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.tools.report import charts, health, reading, summary, words

if TYPE_CHECKING:
    from pathlib import Path


def folder(path: Path, *events: dict[str, Any], metrics: tuple[dict[str, Any], ...] = ()) -> reading.RunFacts:
    """A run folder with these lines; times count from 1000."""
    (path / "attempts").mkdir(parents=True)
    for name, rows in (("events", events), ("metrics", metrics)):
        lines = [json.dumps({**row, "time": 1000.0 + row["time"]}) for row in rows]
        (path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return reading.facts(path)


def start(attempt: int, step: int, time: float, **facts: Any) -> dict[str, Any]:
    """An attempt's first event; its process began two seconds before."""
    kind = "resume" if step else "start"
    return {"event": kind, "attempt": attempt, "step": step, "time": time, "began": 1000.0 + time - 2, **facts}


def made(attempt: int, step: int, time: float) -> dict[str, Any]:
    """A step's numbers."""
    return {"attempt": attempt, "step": step, "time": time, "samples": 8 * (step + 1), "loss": 1.0}


def test_a_queue_is_waited_for_from_the_submission_or_the_end_before(tmp_path: Path) -> None:
    """A second attempt inside of the job waits for no queue; a requeued job does."""
    job = {"job": "12", "submitted": 1000.0}
    run = folder(
        tmp_path / "run",
        start(0, 0, 102, restarts=0, started=1090, **job),
        {"event": "failure", "line": "killed by SIGKILL", "attempt": 0, "time": 110},
        start(1, 5, 114, restarts=0, started=1090, **job),
        {"event": "stop", "reason": "SIGTERM", "step": 9, "attempt": 1, "time": 130},
        start(2, 9, 200, restarts=1, started=1197, **job),
        {"event": "end", "step": 20, "attempt": 2, "time": 220},
        metrics=(made(0, 4, 106), made(0, 6, 109), made(1, 8, 128), made(2, 19, 218)),
    )
    assert [(each.wait, each.queued) for each in run.attempts] == [(90, True), (2, False), (67, True)]
    assert [each.how for each in run.attempts] == ["failed", "stopped", "finished"]
    assert [(each.steps, each.again, each.startup) for each in run.restarts] == [(2, 4, 2), (0, 0, 3)]
    assert reading.goodput(run.attempts) == pytest.approx((4 + 16 + 20) / (20 + 18 + 23))


def test_an_attempt_that_ends_without_a_word_is_lost(tmp_path: Path) -> None:
    """It ended with its last sign; what it did since the last commit is made again."""
    run = folder(
        tmp_path / "run",
        start(0, 0, 2),
        {"event": "save", "step": 5, "seconds": 0.1, "stall": 0.0, "bytes": 9, "attempt": 0, "time": 6},
        start(1, 5, 20),
        metrics=(made(0, 4, 6), made(0, 7, 9)),
    )
    first, last = run.attempts
    assert (first.how, first.ended, first.made, first.kept) == ("lost", 1009, 8, 5)
    assert (last.how, last.made) == ("lost", 5)
    assert [row["ending"] for row in reading.failures(run)] == ["unknown", "unknown"]


def test_an_exception_of_the_program_is_told_without_a_launcher(tmp_path: Path) -> None:
    """Under plain python: a line in events.jsonl, and its class."""
    text = "import torch, worldsize as ws\nrun = ws.Run('run', global_batch=2, micro_batch=1, duration='9st', device='cpu')\n"
    text += "model = run.model(lambda: torch.nn.Linear(1, 1))\n"
    text += "run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)\n"
    text += "for step in run.steps():\n    raise ValueError('no such thing')\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("WORLDSIZE", "TORCHELASTIC"))
    }
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    run = reading.facts(tmp_path / "run")
    (failure,) = reading.failures(run)
    assert run.last.how == "failed"
    assert failure["ending"] == "user error"
    assert "no such thing" in failure["line"]


def test_losses_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    """With the step of the first; they leave a gap in the curve."""
    rows = (made(0, 0, 3), {**made(0, 1, 4), "loss": "nan"}, made(0, 2, 5))
    body = summary.summary(
        folder(tmp_path / "run", start(0, 0, 2), {"event": "end", "attempt": 0, "time": 6, "step": 3}, metrics=rows)
    )
    assert body["series"]["loss"] == {"x": [0, 1, 2], "y": [1.0, None, 1.0]}
    assert body["findings"][0]["title"] == "The loss is no finite number from step 1 on"
    assert (body["status"], body["level"]) == ("finished", "warn")


def test_long_curves_keep_their_peaks(tmp_path: Path) -> None:
    """Some points of each stretch: the least and the most."""
    rows = tuple({**made(0, step, 3), "loss": 50.0 if step == 7777 else step / 1e4} for step in range(10_000))
    curve = summary.summary(folder(tmp_path / "run", start(0, 0, 2), metrics=rows))["series"]["loss"]
    assert len(curve["x"]) <= summary.POINTS + 2
    assert curve["y"][curve["x"].index(7777)] == 50.0
    assert (curve["x"][0], curve["x"][-1]) == (0, 9999)


def test_a_slow_rank_is_named_if_it_is_slow_enough() -> None:
    """Against the median of the others' own work."""

    def judged(slow: float) -> list[str]:
        ranks = [{"rank": rank, "own": {"mean": slow if rank == 3 else 1.0}} for rank in range(5)]
        return [found["title"] for look in (health._slow_rank,) if (found := look({"by_rank": ranks}))]

    assert judged(1.05) == []
    assert judged(1.5) == ["Rank 3 needs 50.0% more time for a step than is usual"]


@given(st.floats(1e-6, 1e9))
def test_lengths_of_time_are_short_and_in_order(seconds: float) -> None:
    """At most ten characters, however long."""
    assert len(words.duration(seconds)) <= 13
    assert words.duration(0.5e-3) == "0.5 ms"
    assert [words.duration(each) for each in (0.9999, 61.0, 125.0, 7260.0, 200_000.0)] == [
        "1 s",
        "61 s",
        "2 min 05 s",
        "2 h 01 min",
        "2 d 07 h",
    ]


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=50), st.booleans())
def test_every_value_lies_on_its_axis(values: list[float], zero: bool) -> None:
    """With a few round ticks."""
    axis = charts.scale(values, zero=zero)
    assert all(-1e-6 <= axis.at(value) <= 1 + 1e-6 for value in values)
    assert len(list(charts.nice(axis))) <= 12
