"""Questions answered through shared memory: nobody sees another question's answer, and the dead are told."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from worldsize.runtime.board import MOST, Board, shared, size_of
from worldsize.runtime.comm import Alone, Ranks
from worldsize.runtime.session import session
from worldsize.testing.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

_SOON = timedelta(seconds=30)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page for three ranks."""
    path = tmp_path / "page"
    path.write_bytes(bytes(size_of(3)))
    return path


def test_every_rank_gets_every_question_joined_by_or(page: Path) -> None:
    """At any difference in speed, no answer is taken from the question before or after."""
    draw = random.Random(5)
    wishes = [[[draw.random() < 0.3 for _ in range(5)] for _ in range(3)] for _ in range(400)]

    def ask(rank: int) -> list[list[float]]:
        board, pause = Board(page, rank, 3, _SOON), random.Random(rank)
        found = []
        for each in wishes:
            question = board.ask(each[rank])
            if pause.random() < 0.1:
                os.sched_yield()
            found.append(question.wait())
        return found

    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(ask, range(3)))
    assert seen == [[[float(any(flags)) for flags in zip(*each, strict=True)] for each in wishes]] * 3


@pytest.mark.parametrize("ahead", [1, 3])
def test_every_rank_gets_every_sum(page: Path, ahead: int) -> None:
    """At any difference in speed, with questions between; numbers stay whole, whatever their bits are."""
    draw = random.Random(7)
    odd = [float("inf"), -0.0, 5e-324, 1.7e308, 0.1, 2.0**53]
    given = [
        [[draw.choice(odd) if draw.random() < 0.1 else draw.uniform(-9, 9) for _ in range(draw.randint(1, MOST))]] * 3
        for _ in range(400)
    ]
    given = [[[value * (rank + 1) for value in each[0]] for rank in range(3)] for each in given]

    def add(rank: int) -> list[list[float]]:
        board, pause = Board(page, rank, 3, _SOON), random.Random(rank)
        found: list[list[float]] = []
        begun, wished = [], []
        for each in given:
            begun.append(board.add(each[rank]))
            question = board.ask([each[rank][0] < 0])
            if pause.random() < 0.5:
                wished.append(question.wait() == [float(any(one[0] < 0 for one in each))])
            if pause.random() < 0.1:
                os.sched_yield()
            if len(begun) >= ahead:
                found.append(begun.pop(0).wait())
        assert all(wished)
        return found + [each.wait() for each in begun]

    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(add, range(3)))
    assert seen == [[[sum(column) for column in zip(*each, strict=True)] for each in given]] * 3


def test_who_begins_a_ninth_sum_knows_the_first(page: Path) -> None:
    """Nobody's numbers are written over while another rank still needs them; what was found is kept."""
    boards = [Board(page, rank, 3, _SOON) for rank in range(3)]
    first = [[board.add([float(step)]) for step in range(8)] for board in boards]
    for _ in range(8):
        for board in boards:
            board.add([5.0])
    assert [[each.wait() for each in one] for one in first] == [[[3.0 * step] for step in range(8)]] * 3


def test_a_rank_can_be_eight_questions_ahead_and_no_more(page: Path) -> None:
    """The ninth waits for those who have not answered the first."""
    boards = [Board(page, rank, 3, timedelta(seconds=1.2)) for rank in range(3)]
    for _ in range(8):
        boards[0].ask([True])
    with pytest.raises(RuntimeError, match=r"no answer from rank 1|rank 1 has ended"):
        boards[0].ask([True])


def test_a_rank_that_has_ended_is_told_in_the_words_of_a_closed_connection(page: Path) -> None:
    """The launcher then knows that this rank only complains about another."""
    boards = [Board(page, rank, 3, _SOON) for rank in (0, 2)]
    if os.fork() == 0:
        Board(page, 1, 3, _SOON)
        os._exit(0)
    os.wait()
    boards[1].ask([True])
    with pytest.raises(RuntimeError, match=r"Connection closed by peer: rank 1 has ended"):
        boards[0].ask([False]).wait()


def test_an_answer_that_does_not_come_is_an_error_after_the_timeout(page: Path) -> None:
    """Nobody waits for ever for a rank that hangs."""
    holder_reads, holder_writes = os.pipe()
    child = os.fork()
    if child == 0:
        Board(page, 1, 3, _SOON)
        os.close(holder_writes)
        os.read(holder_reads, 1)
        os._exit(0)
    boards = [Board(page, rank, 3, timedelta(seconds=1.5)) for rank in (0, 2)]
    boards[1].ask([True])
    try:
        with pytest.raises(RuntimeError, match=r"no answer from rank 1|rank 1 has ended"):
            boards[0].ask([False]).wait()
    finally:
        os.close(holder_writes)
        os.waitpid(child, 0)


def test_a_page_of_another_size_is_refused(page: Path) -> None:
    """A rank on another host may find a file of the same name."""
    with pytest.raises(OSError, match="not the page"):
        Board(page, 0, 2, _SOON)


def _shared() -> tuple[bool, list[float], list[float]]:
    comm = session("cpu").comm
    assert isinstance(comm, Ranks)
    many = comm.sum([float(comm.rank)] * (MOST + 1))
    assert many == [1.0] * len(many)
    return comm.board is not None, comm.start_any([comm.rank == 1, False]).wait(), comm.sum([1.0, comm.rank / 2])


def test_ranks_of_one_host_share_a_board() -> None:
    """Every rank maps the same page and reads the same answer."""
    assert run_ranks(_shared, 2) == [(True, [1.0, 0.0], [2.0, 0.5])] * 2


def test_without_room_in_memory_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page that is only promised would kill the rank that writes on it."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr("worldsize.runtime.board._MEMORY", tmp_path)
    assert shared(Alone(), timedelta(seconds=1)) is None
    assert not list(tmp_path.iterdir())
