"""Who is blamed for a stall, from what ranks say: the rules, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from worldsize.runtime.waiting import Call
from worldsize.train.suspect import Said, Silent, find

REDUCE, GATHER, BOARD = Call("0", 14, "all_reduce"), Call("2", 1, "all_gather"), Call("board", 6, "agreement")


def said(**facts: Any) -> Said:
    """A rank in its own code, for longer than it may be."""
    usual: dict[str, Any] = {"step": 5, "phase": "compute", "seconds": 9.0, "overdue": True, "waits": False}
    return Said(**{**usual, **facts})


def waiting(call: Call = REDUCE, begun: dict[str, int] | None = None, **facts: Any) -> Said:
    """A rank in a collective."""
    return said(waits=True, open=(call,), begun={call.group: call.number} if begun is None else begun, **facts)


def blamed(speaking: dict[int, Said], silent: dict[int, Silent] | None = None) -> tuple[int | None, str]:
    """The rank and why."""
    found = find(speaking, silent or {})
    assert found is not None
    return found.rank, found.why


@pytest.mark.parametrize(
    ("state", "words"), [("T", "stopped by a signal"), ("t", "stopped by a debugger"), ("Z", "ended")]
)
def test_a_process_that_is_stopped_goes_before_all(state: str, words: str) -> None:
    """Also before one that does not answer and one that is in its own code."""
    rank, why = blamed({0: waiting(), 1: said()}, {2: Silent("R"), 3: Silent(state)})
    assert (rank, why.startswith(words)) == (3, True)
    assert why.endswith("; the others wait in all_reduce (14 of group 0) of step 5")


def test_a_rank_that_says_nothing_goes_before_one_in_its_own_code() -> None:
    """With the line that its stack shows."""
    rank, why = blamed({0: waiting(), 1: said()}, {2: Silent("R", "train.py:7 in load")})
    assert (rank, why.partition(";")[0]) == (
        2,
        "does not answer: native code holds its interpreter, in train.py:7 in load",
    )


def test_a_host_that_is_gone_is_told_from_a_busy_one() -> None:
    """Nobody there can look at the process."""
    assert blamed({0: waiting()}, {1: Silent()})[1].startswith("does not answer, nor does any rank of its host")


def test_a_disk_that_hangs_is_told_by_the_kernel() -> None:
    """State D, and in which of its functions."""
    assert (
        "a device or a file system (state D, nfs_wait)" in blamed({0: waiting()}, {1: Silent("D", "", "nfs_wait")})[1]
    )


@pytest.mark.parametrize(("busy", "word"), [(True, "runs"), (False, "sleeps")])
def test_a_rank_outside_of_any_collective_is_blamed(busy: bool, word: str) -> None:
    """While all the others are in one."""
    rank, why = blamed({0: waiting(), 1: said(busy=busy, line="train.py:9 in f"), 2: waiting()})
    assert rank == 1
    assert why.startswith(f"{word} outside of any collective, in train.py:9 in f; the others wait in all_reduce")


def test_the_rank_furthest_behind_is_blamed() -> None:
    """Of several in their own code."""
    assert blamed({0: said(step=6), 1: said(step=5), 2: said(step=6)})[0] == 1


def test_who_may_take_longer_is_not_blamed_yet() -> None:
    """However long the others wait: it loads data, or evaluates, within its time."""
    assert find({0: waiting(), 1: said(phase="data", overdue=False)}, {}) is None
    assert find({0: waiting(overdue=False), 1: waiting(overdue=False)}, {}) is None


def test_a_data_worker_is_named_with_its_rank() -> None:
    """And where it is."""
    rank, why = blamed({0: waiting(), 1: said(phase="data", workers=("data worker 7 is in data.py:3 in read",))})
    assert (rank, why.partition(";")[0]) == (1, "waits for data: data worker 7 is in data.py:3 in read")


def test_a_rank_that_left_a_collective_out_is_blamed() -> None:
    """Of three, two wait for it."""
    here, past = waiting(GATHER, {"0": 13, "2": 1}), waiting(REDUCE, {"0": 14, "2": 0})
    rank, why = blamed({0: here, 1: past, 2: here})
    assert rank == 1
    assert why.startswith(
        "never began all_gather (1 of group 2), in which ranks 0, 2 wait, and is in all_reduce (14 of group 0)"
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_the_one_that_is_further_left_it_out(swapped: bool) -> None:
    """By its line in the program, or by having ended the step."""
    here = waiting(GATHER, {"0": 13, "2": 1, "board": 5}, line="train.py:20 in main")
    past = waiting(REDUCE, {"0": 14, "2": 0, "board": 5}, line="train.py:24 in main")
    after = waiting(BOARD, {"0": 13, "2": 0, "board": 6}, line="train.py:8 in main")
    for other in (past, after):
        pair = {0: other, 1: here} if swapped else {0: here, 1: other}
        assert blamed(pair)[0] == (0 if swapped else 1)


def test_where_it_cannot_be_told_that_is_said() -> None:
    """Two that wait for each other at the same line."""
    here, there = (
        waiting(GATHER, {"0": 13, "2": 1}, line="a.py:3 in f"),
        waiting(REDUCE, {"0": 14, "2": 0}, line="a.py:3 in f"),
    )
    assert "it may as well be rank" in blamed({0: here, 1: there})[1]


def test_another_collective_under_the_same_number_is_seen() -> None:
    """The rare one is wrong."""
    other = waiting(Call("0", 14, "barrier"))
    rank, why = blamed({0: waiting(), 1: waiting(), 2: other})
    assert (rank, why) == (2, "is in barrier (14 of group 0), the others are in all_reduce (14 of group 0)")


def test_nobody_is_blamed_where_all_are_in_the_same() -> None:
    """The network or a device hangs, and that is said."""
    rank, why = blamed({0: waiting(), 1: waiting()})
    assert (rank, why) == (
        None,
        "all 2 ranks are in all_reduce (14 of group 0), and none is behind: the network or a device hangs",
    )


def test_what_is_said_survives_the_file() -> None:
    """JSON and back."""
    import json

    one = waiting(GATHER, ranks={"2": [0, 1]}, workers=("a",), line="x.py:1 in f")
    assert Said.from_json(json.loads(json.dumps(one.to_json()))) == one
