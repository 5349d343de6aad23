"""Room: what the ranks wish for after a step, and when all of them know it.

An answer that is waited for at once makes each step as long as the slowest rank's. Which rank that is changes: hosts that
launch work for a device need a tenth more or less from step to step, and over two steps much of that evens out. So what a rank
wishes for after a step is heard by all, itself included, after the next one. Two things need no such delay: an end that every
rank wishes for, and where all know that they meet anyway they hear everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from worldsize.runtime.clock import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worldsize.runtime.clock import Clock
    from worldsize.runtime.comm import Comm, Pending


class Wishes(NamedTuple):
    """What a rank would like, or what any rank does.

    Attributes:
        leave: to save, and to be started again later.
        end: to end the run.
        save: a commit.
        write: the numbers of the steps written.
        sums: numbers of the program's own summed over ranks.
    """

    leave: bool = False
    end: bool = False
    save: bool = False
    write: bool = False
    sums: bool = False


class Agreement:
    """Asks once a step. Every rank calls the same methods in the same order.

    Args:
        comm: the other ranks.
        clock: is told what is waited for.
        mine: what this rank wishes for now.
    """

    def __init__(self, comm: Comm, clock: Clock, mine: Callable[[], Wishes]) -> None:
        self._comm, self._clock, self._mine = comm, clock, mine
        self._before: Pending | None = None

    def answers(self, *, meet: bool) -> Iterator[Wishes]:
        """What is to be done after a step, one after another; the same on every rank.

        Args:
            meet: wait for all, and hear everything.
        """
        heard = Wishes() if self._before is None else self._any(self._before)
        self._before = None
        # A commit or an end is nothing to be alone with: all know of it, so what else is wished for by now belongs to it.
        if meet or heard.leave or heard.end or heard.save or self._comm.size == 1:
            yield Wishes(*map(max, heard, self._any(self._ask(self._mine()))))
            return
        yield heard
        mine = self._mine()
        self._before = self._ask(mine)
        if (mine.leave or mine.end) and not all(self._wait(self._before)[len(mine) :]):
            before, self._before = self._before, None
            yield self._any(before)

    def _ask(self, mine: Wishes) -> Pending:
        return self._comm.start_any([*mine, not mine.leave, not mine.end])

    def _wait(self, pending: Pending) -> list[float]:
        before = self._clock.enter(COLLECTIVES)
        found = pending.wait()
        self._clock.enter(before)
        return found

    def _any(self, pending: Pending) -> Wishes:
        return Wishes(*map(bool, self._wait(pending)[: len(Wishes._fields)]))
