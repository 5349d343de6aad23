"""Room: yes-or-no questions between ranks of one host, answered through a page of shared memory.

A collective over sockets takes some 200 µs, at every step; writing one word that others look at takes 5. A rank's
word holds the number of the question beside its answers and is stored at once, so that no order of stores matters. Of
two words it writes them in turn: nobody is two questions ahead, since an answer is only known when all have given it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from worldsize.runtime.comm import Comm

_BITS = 8
_WORD = 8
_MEMORY = Path("/dev/shm")  # noqa: S108 - the file is made by mkstemp
_SPINS = 10
_PATIENT = 1.0
"""Seconds after which a rank that waits looks whether the others are still there."""


class Board:
    """One rank's view of the page.

    Args:
        path: a file that all ranks can map, of 16 bytes a rank. It may be deleted once every rank has it.
        rank: this rank; size: how many there are.
        timeout: how long an answer may take.

    Attributes:
        asked: how many questions this rank has answered.

    Raises:
        OSError: the file is not there, or not of the right size: this rank is on another host.
    """

    def __init__(self, path: Path, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout
        self._file = os.open(path, os.O_RDWR)
        if os.fstat(self._file).st_size != _bytes(size):
            os.close(self._file)
            raise OSError(f"{path} is not the page")
        # A process may be in many worlds one after another.
        weakref.finalize(self, os.close, self._file)
        self._words = memoryview(mmap.mmap(self._file, _bytes(size))).cast("Q")
        # Held by the kernel until this process ends, in whatever way: how the others know that it did.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.asked = 0

    def ask(self, wishes: Sequence[bool]) -> Question:
        """Give this rank's answers (at most 8) to the next question. All ranks ask the same number of times."""
        assert len(wishes) <= _BITS
        self.asked += 1
        first = (self.asked % 2) * self._size
        bits = sum(1 << place for place, wish in enumerate(wishes) if wish)
        self._words[first + self._rank] = self.asked << _BITS | bits
        return Question(self, self.asked, first, len(wishes))

    def read(self, asked: int, first: int) -> int:
        """All ranks' answers to question number `asked`, joined by "or"."""
        found, words = 0, self._words
        for place in range(first, first + self._size):
            word = words[place]
            if word >> _BITS != asked:
                word = self._await(place, asked)
            found |= word & (1 << _BITS) - 1
        return found

    def _await(self, place: int, asked: int) -> int:
        began, look = time.monotonic(), _PATIENT
        for turn in count():
            word = self._words[place]
            if word >> _BITS == asked:
                return word
            waited = time.monotonic() - began
            # The others come within microseconds, or are at work for as long as a step takes: on a host with fewer
            # cores than ranks they need the one that looking often would use.
            time.sleep(0 if turn < _SPINS else min(max(waited / 8, 5e-5), 5e-3))
            if waited > look:
                look += _PATIENT
                self._refuse_absent(place % self._size, waited)
        raise AssertionError

    def _refuse_absent(self, rank: int, waited: float) -> None:
        """Raises RuntimeError, in the words in which sockets tell it, where that rank's process has ended."""
        if waited > self._timeout.total_seconds():
            raise RuntimeError(f"Timed out after {waited:.0f} s: no answer from rank {rank}")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        raise RuntimeError(f"Connection closed by peer: rank {rank} has ended")


@dataclass(frozen=True, slots=True)
class Question:
    """A question that this rank has answered."""

    board: Board
    asked: int
    first: int
    count: int

    def wait(self) -> list[float]:
        """For each wish 1.0 where any rank has it, else 0.0. Blocks until every rank has answered."""
        found = self.board.read(self.asked, self.first)
        return [float(found >> place & 1) for place in range(self.count)]


def shared(comm: Comm, timeout: timedelta) -> Board | None:
    """A board between all ranks, or None where one of them cannot see it. Collective.

    Args:
        comm: the agreement that it will serve.
        timeout: how long an answer may take.
    """
    path = comm.broadcast(_sheet(comm.size) if comm.rank == 0 else None)
    board = None
    if path is not None:
        with suppress(OSError):
            board = Board(path, comm.rank, comm.size, timeout)
    everywhere = all(comm.gather(board is not None))
    if path is not None and comm.rank == 0:
        path.unlink()
    return board if everywhere else None


def _sheet(size: int) -> Path | None:
    """A new page in memory, which only its owner can open; None where the system has no place for that."""
    if not _MEMORY.is_dir():
        return None
    try:
        descriptor, name = tempfile.mkstemp(prefix="worldsize-board-", dir=_MEMORY)
    except OSError:
        return None
    os.ftruncate(descriptor, _bytes(size))
    os.close(descriptor)
    return Path(name)


def _bytes(size: int) -> int:
    return 2 * size * _WORD
