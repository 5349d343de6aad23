"""Facts about the two files of a run folder."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from worldsize.testing.faults import use_up
from worldsize.track.jsonl import JsonLines, latest, read
from worldsize.train.times import Lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    Kind = Callable[[Path, Callable[[str], None]], AbstractContextManager[Callable[[int], None]]]


def test_a_line_is_a_step(tmp_path: Path) -> None:
    """Numbers come back as they were logged, with step and attempt."""
    tracker = JsonLines(tmp_path, attempt=3)
    tracker.log(7, {"loss": 0.1 + 0.2})
    tracker.close()
    (row,) = read(tmp_path / "metrics.jsonl")
    assert (row["step"], row["attempt"], row["loss"]) == (7, 3, 0.1 + 0.2)


def test_numbers_that_json_lacks_come_back(tmp_path: Path) -> None:
    """A loss that is not finite is still read as that number."""
    tracker = JsonLines(tmp_path, attempt=0)
    tracker.log(0, {"loss": math.inf})
    tracker.log(1, {"loss": math.nan})
    tracker.close()
    found = latest(read(tmp_path / "metrics.jsonl"), "loss")
    assert found[0] == math.inf
    assert math.isnan(found[1])


def test_the_later_attempt_holds(tmp_path: Path) -> None:
    """Of two lines for one step, the one of the later attempt counts."""
    for attempt, loss in ((0, 1.0), (1, 2.0)):
        tracker = JsonLines(tmp_path, attempt)
        tracker.log(5, {"loss": loss})
        tracker.close()
    assert latest(read(tmp_path / "metrics.jsonl"), "loss") == {5: 2.0}


def test_a_cut_line_harms_no_other(tmp_path: Path) -> None:
    """After a kill in the middle of a line the next attempt begins on a new one."""
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "sa', encoding="utf-8")
    tracker = JsonLines(tmp_path, attempt=1)
    tracker.event("resume", step=4)
    tracker.close()
    assert [row["event"] for row in read(tmp_path / "events.jsonl")] == ["start", "resume"]


@contextmanager
def metrics(folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Writes the line of a step."""
    tracker = JsonLines(folder, 0, say)
    yield lambda step: tracker.log(step, {"loss": 0.1})
    tracker.close()


@contextmanager
def times(folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Writes the line of a second."""
    lines = Lines(folder, 0, say)
    yield lambda step: lines({"step": step, "phases": {}})


@pytest.mark.parametrize("kind", [metrics, times])
def test_a_full_disk_costs_lines_and_no_training(small_disk: Path, kind: Kind) -> None:
    """It is said once; when there is room again, lines are whole again, and begin on their own."""
    said: list[str] = []
    with kind(small_disk, said.append) as write:
        write(0)
        use_up(small_disk / "other")
        for step in range(1, 400):
            write(step)
        (file,) = small_disk.glob("*.jsonl")
        (line,) = said
        assert file.name in line
        assert "No space left on device" in line
        (small_disk / "other").unlink()
        for step in range(400, 500):
            write(step)
        steps = [row["step"] for row in read(file)]
        assert steps == [*range(len(steps) - 100), *range(400, 500)]
        assert 1 < len(steps) < 300
