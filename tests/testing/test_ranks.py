"""A function on real ranks: its results, its errors, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.pools import pool
from worldsize.errors import LaunchError, StepError
from worldsize.runtime import session
from worldsize.testing.nursery import Crew, nursery
from worldsize.testing.ranks import RankPool, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def place(word: str) -> tuple[int, int, str, int]:
    """Who we are, after a collective of each kind."""
    here = session.session("cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert here.comm.gather(here.comm.rank) == list(range(int(total)))
    return here.comm.rank, here.comm.size, word, os.getpid()


def test_every_rank_returns_its_result() -> None:
    """In rank order, from processes of their own."""
    found = run_ranks(place, 3, "hello")
    assert [row[:3] for row in found] == [(0, 3, "hello"), (1, 3, "hello"), (2, 3, "hello")]
    assert len({pid for *_, pid in found} | {os.getpid()}) == 4


def test_a_pool_opens_the_world_anew_for_every_call() -> None:
    """In the same processes."""
    first, second = pool(2).run(place, "a"), pool(2).run(place, "b")
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
    assert [word for _, _, word, _ in second] == ["b", "b"]


def fail(kind: str) -> None:
    """Rank 1 fails while rank 0 waits for it."""
    comm = session.session("cpu").comm
    if comm.rank == 1:
        if kind == "raise":
            raise StepError("as asked", found="1", do="nothing")
        if kind == "exit":
            raise SystemExit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_the_first_exception_comes_back_whole() -> None:
    """Its class, its words, and where it was raised; the next call finds fresh ranks."""
    with pytest.raises(StepError, match="as asked") as caught:
        pool(2).run(fail, "raise")
    assert (caught.value.found, caught.value.do) == ("1", "nothing")
    assert any("On rank 1 of 2" in note and "in fail" in note for note in caught.value.__notes__)
    assert len(pool(2).run(place, "c")) == 2


def test_an_exit_comes_back() -> None:
    """With its code."""
    with pytest.raises(SystemExit) as caught:
        pool(2).run(fail, "exit")
    assert caught.value.code == 7


def test_a_dead_rank_is_named() -> None:
    """Nobody waits for it."""
    with pytest.raises(LaunchError, match="rank 1 of 2 died"):
        pool(2).run(fail, "kill")


def sleep() -> None:
    """Longer than anybody waits."""
    session.session("cpu")
    time.sleep(600)


def test_the_time_is_limited() -> None:
    """The processes end with it."""
    ranks = RankPool(2)
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 of 2 has no result after 1 s"):
        ranks.run(sleep, timeout=1)
    assert time.monotonic() - began < 60


def unpicklable() -> None:
    """Raises what cannot travel."""

    class Local(Exception):  # noqa: N818 - a class that nobody else has
        def __reduce__(self) -> tuple[object, ...]:
            raise TypeError

    raise Local("only here")


def test_an_exception_that_cannot_travel_is_told() -> None:
    """By its traceback."""
    with pytest.raises(LaunchError, match="cannot be sent here") as caught:
        pool(1).run(unpicklable)
    assert any("only here" in note for note in caught.value.__notes__)


def leave(code: int) -> None:
    """Ends like a program."""
    print("about to leave", flush=True)  # noqa: T201 - a program's output
    if code == 1:
        raise ValueError("a traceback")
    raise SystemExit(code)


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_crew_has_exit_codes_and_output(tmp_path: Path, code: int) -> None:
    """As programs do."""
    crew = Crew(2, tmp_path)
    crew.start(leave, code)
    assert crew.wait(60) == [code, code]
    crew.close()
    assert crew.said().count("about to leave") == 2
    assert ("ValueError: a traceback" in crew.said()) == (code == 1)


def test_a_crew_dies_as_one(tmp_path: Path) -> None:
    """One process group of its own."""
    crew = Crew(2, tmp_path)
    crew.start(sleep)
    assert {os.getpgid(pid) for pid in crew.pids} == {crew.pids[0]}
    crew.kill()
    assert crew.codes() == [-9, -9]
    crew.close()


def test_what_is_forked_has_made_no_thread() -> None:
    """Forking a process with threads would leave locks behind."""
    crew = nursery()
    own = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    (pid,) = [child.pid for child in own if "nurse" in " ".join(child.cmdline())]
    assert crew.code is not None
    assert psutil.Process(pid).num_threads() == 1
