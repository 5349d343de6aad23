"""Facts about the rows of a run: those that hold, once each, in the order of steps, while the file grows."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from worldsize.track.jsonl import JsonLines, latest, read
from worldsize.track.rows import Tail, ended

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.track.base import Row


def attempt(folder: Path, number: int, first: int, last: int) -> None:
    """Steps `first` to before `last`, with numbers that tell the attempt."""
    lines = JsonLines(folder, number)
    lines.event("resume" if number else "start", step=first)
    for step in range(first, last):
        lines.log(step, {"loss": step + number / 10})
    lines.close()


def everything(tail: Tail) -> list[Row]:
    """All that is there."""
    found: list[Row] = []
    while rows := tail.take(lambda _: True, math.inf):
        found += rows
    return found


def test_what_a_later_attempt_came_back_behind_does_not_hold(tmp_path: Path) -> None:
    """Also where that attempt has not come as far again."""
    attempt(tmp_path, 0, 0, 8)
    attempt(tmp_path, 1, 4, 6)
    assert [(row.step, row.values["loss"]) for row in everything(Tail(tmp_path, 0, 0))] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.1), (5, 5.1),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(starts=st.lists(st.integers(0, 12), max_size=5), lengths=st.lists(st.integers(0, 12), min_size=6, max_size=6))
def test_steps_grow_whatever_was_resumed(tmp_path_factory: Any, starts: list[int], lengths: list[int]) -> None:
    """And of a complete run every number is the latest one."""
    folder = tmp_path_factory.mktemp("run")
    for number, (first, length) in enumerate(zip([0, *starts], lengths, strict=False)):
        attempt(folder, number, first, first + length)
    attempt(folder, 6, 0 if not starts else min(starts), 30)
    rows = everything(Tail(folder, 0, 6))
    steps = [row.step for row in rows]
    assert steps == sorted(set(steps))
    assert {row.step: row.values["loss"] for row in rows} == {
        step: value for step, value in latest(read(folder / "metrics.jsonl"), "loss").items() if step in steps
    }


def test_lines_of_one_step_are_one_row(tmp_path: Path) -> None:
    """The program's own numbers and those of the step; the newest step waits, for more of it may come."""
    lines = JsonLines(tmp_path, 0)
    lines.event("start", step=0)
    tail = Tail(tmp_path, 0, 0)
    lines.log(0, {"own": 1.0})
    assert tail.take(lambda _: True, 0) == []
    lines.log(0, {"loss": math.nan})
    lines.log(1, {"loss": 2.0})
    (row,) = tail.take(lambda _: True, 0)
    assert row.values["own"] == 1.0
    assert math.isnan(row.values["loss"])
    lines.close()
    assert [row.step for row in tail.take(lambda _: True, 2)] == [1]


def test_what_is_not_ready_waits_and_keeps_the_order(tmp_path: Path) -> None:
    """Only what stays is given on; the others come later, with what they became meanwhile."""
    attempt(tmp_path, 0, 0, 5)
    tail = Tail(tmp_path, 1, 0)
    assert [row.step for row in tail.take(lambda row: row.step < 3, 3)] == [1, 2]
    assert tail.through == 3
    assert [row.step for row in everything(tail)] == [3, 4]


def test_a_long_history_comes_in_parts(tmp_path: Path) -> None:
    """Memory does not grow with it."""
    attempt(tmp_path, 0, 0, 5000)
    tail = Tail(tmp_path, 0, 0)
    first = tail.take(lambda _: True, math.inf)
    assert 0 < len(first) <= 2000
    assert [row.step for row in [*first, *everything(tail)]] == list(range(5000))


def test_a_line_under_way_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """Half of it is neither an error nor lost."""
    attempt(tmp_path, 0, 0, 1)
    tail = Tail(tmp_path, 0, 0)
    assert len(everything(tail)) == 1
    text = json.dumps({"step": 1, "attempt": 0, "time": 1.0, "loss": 3.0}) + "\n"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(text[:9])
        file.flush()
        assert everything(tail) == []
        file.write(text[9:])
    assert [row.values for row in everything(tail)] == [{"loss": 3.0}]


def test_an_attempt_may_go_back_by_itself(tmp_path: Path) -> None:
    """What was not taken is replaced; what was taken comes again only to those who can take it back."""
    lines = JsonLines(tmp_path, 0)
    lines.event("start", step=0)
    tails = [Tail(tmp_path, 0, 0), Tail(tmp_path, 0, 0), Tail(tmp_path, 0, 0, rewinds=True)]
    for step in range(5):
        lines.log(step, {"loss": float(step)})
    assert [len(everything(tail)) for tail in tails[1:]] == [5, 5]
    for step in range(2, 6):
        lines.log(step, {"loss": step * 10.0})
    lines.close()
    assert [row.values["loss"] for row in everything(tails[0])] == [0, 1, 20, 30, 40, 50]
    assert [row.values["loss"] for row in everything(tails[1])] == [50]
    assert [row.values["loss"] for row in everything(tails[2])] == [20, 30, 40, 50]
    assert [tail.back for tail in tails] == [None, None, 2]


def test_the_rest_of_an_interrupted_step_is_not_lost(tmp_path: Path) -> None:
    """The step is in the library, and what its body logs in the next attempt comes with the step after it."""
    attempt(tmp_path, 0, 0, 4)
    lines = JsonLines(tmp_path, 1)
    lines.event("resume", step=4)
    lines.log(3, {"accuracy": 0.5})
    lines.log(4, {"loss": 4.1})
    lines.close()
    assert [(row.step, row.values) for row in everything(Tail(tmp_path, 4, 1))] == [
        (4, {"accuracy": 0.5, "loss": 4.1})
    ]
    assert everything(Tail(tmp_path, 0, 1))[3].values == {"loss": 3.0, "accuracy": 0.5}


def test_how_attempts_ended_is_known_as_far_as_they_said(tmp_path: Path) -> None:
    """Without a word it was a kill."""
    for number in range(4):
        attempt(tmp_path, number, 0, 1)
    said = JsonLines(tmp_path, 1)
    said.event("stop", step=1, reason="SIGTERM")
    said.close()
    said = JsonLines(tmp_path, 2)
    said.event("failure", line="ValueError: no")
    said.close()
    assert ended(read(tmp_path / "events.jsonl"), 3) == [
        "0: killed", "1: stopped at step 1 (SIGTERM)", "2: failed: ValueError: no",
    ]  # fmt: skip
