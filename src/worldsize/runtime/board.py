"""Room: yes-or-no questions and small sums between ranks of one host, answered through a page of shared memory.

A collective over sockets takes some 200 µs, at every step; writing a word that others look at takes 5. Beside each word stands
the same one mixed with the question's number: both fit together once both are of this question, in whatever order they came.

A rank begins a question when it knows the one that is eight before it. So everyone has begun that one then, and knows the
one that is eight before that: sixteen places are enough.
"""

from __future__ import annotations

import fcntl
import mmap
import operator
import os
import struct
import tempfile
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
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
_UNDER_WAY = 8
_PLACES = 2 * _UNDER_WAY
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
        begun: how many questions and sums this rank has begun: all of them meet here, had they come as far as this one.

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
        self.begun = 0
        self._under_way: deque[Question] = deque()

    def ask(self, wishes: Sequence[bool]) -> Question:
        """For each of at most 8 wishes, 1.0 where any rank has it, else 0.0. All ranks ask, and add, alike."""
        assert len(wishes) <= _BITS
        bits = sum(1 << place for place, wish in enumerate(wishes) if wish)
        return self._begin([bits], partial(_any, count=len(wishes)))

    def add(self, numbers: Sequence[float]) -> Question:
        """The sums of at most `MOST` numbers over all ranks, equally many on each, rank by rank in float64."""
        assert len(numbers) <= MOST
        words = struct.unpack(f"{len(numbers)}Q", struct.pack(f"{len(numbers)}d", *numbers))
        return self._begin(words, _total)

    def _begin(self, words: Sequence[int], join: Callable[[list[Sequence[int]]], list[float]]) -> Question:
        if len(self._under_way) == _UNDER_WAY:
            self._under_way.popleft().wait()
        self.begun += 1
        mark, at = _mark(self.begun), self._place(self.begun, self._rank)
        for place, word in enumerate(words):
            self._words[at + 2 * place], self._words[at + 2 * place + 1] = word, word ^ mark
        begun = Question(self, self.begun, len(words), join)
        self._under_way.append(begun)
        return begun

    def read(self, number: int, count: int) -> list[Sequence[int]]:
        """The words that each rank has given to a question."""
        mark = _mark(number)
        found: list[Sequence[int]] = []
        for rank in range(self._size):
            at = self._place(number, rank)
            found.append(
                [self._await(rank, partial(self._word, place, mark)) for place in range(at, at + 2 * count, 2)]
            )
        return found

    def _word(self, place: int, mark: int) -> int | None:
        word = self._words[place]
        return word if word ^ self._words[place + 1] == mark else None

    def _place(self, number: int, rank: int) -> int:
        """Where a rank's words for a question begin."""
        return (number % _PLACES * self._size + rank) * 2 * MOST

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


@dataclass(slots=True)
class Question:
    """A question or a sum to which this rank has given its part."""

    board: Board
    number: int
    words: int
    join: Callable[[list[Sequence[int]]], list[float]]
    _found: list[float] | None = None

    def wait(self) -> list[float]:
        """The answer. Blocks until every rank has given its part."""
        if self._found is None:
            self._found = self.join(self.board.read(self.number, self.words))
        return self._found


def size_of(ranks: int) -> int:
    """Bytes of the page for so many ranks."""
    return ranks * _WORD * 2 * _PLACES * MOST


def _any(given: list[Sequence[int]], count: int) -> list[float]:
    bits = reduce(operator.or_, (word for (word,) in given))
    return [float(bits >> place & 1) for place in range(count)]


def _total(given: list[Sequence[int]]) -> list[float]:
    count = len(given[0])
    numbers = [struct.unpack(f"{count}d", struct.pack(f"{count}Q", *words)) for words in given]
    return [sum(column) for column in zip(*numbers, strict=True)]


def _mark(number: int) -> int:
    return number * _MIX & _MASK


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
    try:
        # Not ftruncate: where memory is short, the first rank to write would be killed.
        os.posix_fallocate(descriptor, 0, size_of(size))
    except OSError:
        Path(name).unlink()
        return None
    finally:
        os.close(descriptor)
    return Path(name)
