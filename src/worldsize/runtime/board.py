"""Room: yes-or-no questions and small sums between ranks of one host, answered through a page of shared memory.

A collective over sockets takes some 200 µs, at every step; writing one word that others look at takes 5. A rank's
word holds the number of the question beside its answers and is stored at once, so that no order of stores matters. Of
two words it writes them in turn: nobody is two questions ahead, since an answer is only known when all have given it.

A number of a sum fills a word. Beside it stands the same word mixed with the sum's number: both fit together once both are of
this sum, in whatever order they came. A rank begins a sum when it knows the last but one; so all know the fourth before it, and
eight places are enough.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from worldsize.runtime.comm import Comm

_BITS = 8
_WORD = 8
MOST = 8
"""Numbers of a sum."""
_PLACES, _UNDER_WAY = 8, 2
_MIX, _MASK = 0x9E37_79B9_7F4A_7C15, (1 << 64) - 1
"""An odd number: its multiples are all different, and none is zero, as a new page is."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - the file is made by mkstemp
_SPINS = 10
_PATIENT = 1.0
"""Seconds after which a rank that waits looks whether the others are still there."""


class Board:
    """One rank's view of the page.

    Args:
        path: a file that all ranks can map, of the size that `size_of` says. It may be deleted once every rank has it.
        rank: this rank; size: how many there are.
        timeout: how long an answer may take.

    Attributes:
        asked: how many questions this rank has answered; added: to how many sums it has given its numbers.

    Raises:
        OSError: the file is not there, or not of the right size: this rank is on another host.
    """

    def __init__(self, path: Path, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout
        self._file = os.open(path, os.O_RDWR)
        if os.fstat(self._file).st_size != size_of(size):
            os.close(self._file)
            raise OSError(f"{path} is not the page")
        # A process may be in many worlds one after another.
        weakref.finalize(self, os.close, self._file)
        self._words = memoryview(mmap.mmap(self._file, size_of(size))).cast("Q")
        # Held by the kernel until this process ends, in whatever way: how the others know that it did.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.asked = self.added = 0
        self._sums: deque[Sum] = deque()

    @property
    def begun(self) -> int:
        """How often all ranks would have met here, had they come as far as this one."""
        return self.asked + self.added

    def ask(self, wishes: Sequence[bool]) -> Question:
        """Give this rank's answers (at most 8) to the next question. All ranks ask the same number of times."""
        assert len(wishes) <= _BITS
        self.asked += 1
        first = (self.asked % 2) * self._size
        bits = sum(1 << place for place, wish in enumerate(wishes) if wish)
        self._words[first + self._rank] = self.asked << _BITS | bits
        return Question(self, self.asked, first, len(wishes))

    def add(self, numbers: Sequence[float]) -> Sum:
        """Give this rank's numbers (at most `MOST`) to the next sum. All ranks add equally many, the same number of times."""
        assert len(numbers) <= MOST
        if len(self._sums) == _UNDER_WAY:
            self._sums.popleft().wait()
        self.added += 1
        found = Sum(self, self.added, len(numbers))
        mark, at = _mark(self.added), self._place(self.added, self._rank)
        for number, word in enumerate(struct.unpack(f"{len(numbers)}Q", struct.pack(f"{len(numbers)}d", *numbers))):
            self._words[at + 2 * number], self._words[at + 2 * number + 1] = word, word ^ mark
        self._sums.append(found)
        return found

    def total(self, added: int, count: int) -> list[float]:
        """Sum number `added` of so many numbers, rank by rank in float64."""
        mark, found = _mark(added), [0.0] * count
        for rank in range(self._size):
            at = self._place(added, rank)
            words = [self._await(rank, partial(self._number, place, mark)) for place in range(at, at + 2 * count, 2)]
            given = struct.unpack(f"{count}d", struct.pack(f"{count}Q", *words))
            found = [before + more for before, more in zip(found, given, strict=True)]
        return found

    def _number(self, place: int, mark: int) -> int | None:
        word = self._words[place]
        return word if word ^ self._words[place + 1] == mark else None

    def _answer(self, place: int, asked: int) -> int | None:
        word = self._words[place]
        return word if word >> _BITS == asked else None

    def _place(self, added: int, rank: int) -> int:
        """Where a rank's numbers for a sum begin: behind the words of the questions."""
        return 2 * self._size + (added % _PLACES * self._size + rank) * 2 * MOST

    def read(self, asked: int, first: int) -> int:
        """All ranks' answers to question number `asked`, joined by "or"."""
        found = 0
        for rank in range(self._size):
            found |= self._await(rank, partial(self._answer, first + rank, asked)) & (1 << _BITS) - 1
        return found

    def _await(self, rank: int, look: Callable[[], int | None]) -> int:
        """What a rank is going to write, once it is there."""
        began, patience = time.monotonic(), _PATIENT
        for turn in count():
            word = look()
            if word is not None:
                return word
            waited = time.monotonic() - began
            # The others come within microseconds, or are at work for as long as a step takes: on a host with fewer
            # cores than ranks they need the one that looking often would use.
            time.sleep(0 if turn < _SPINS else min(max(waited / 8, 5e-5), 5e-3))
            if waited > patience:
                patience += _PATIENT
                self._refuse_absent(rank, waited)
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


@dataclass(slots=True)
class Sum:
    """A sum to which this rank has given its numbers."""

    board: Board
    added: int
    count: int
    _found: list[float] | None = None

    def wait(self) -> list[float]:
        """The sums. Blocks until every rank has given its numbers."""
        if self._found is None:
            self._found = self.board.total(self.added, self.count)
        return self._found


def size_of(ranks: int) -> int:
    """Bytes of the page for so many ranks."""
    return ranks * _WORD * 2 * (1 + _PLACES * MOST)


def _mark(added: int) -> int:
    return added * _MIX & _MASK


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
    os.ftruncate(descriptor, size_of(size))
    os.close(descriptor)
    return Path(name)
