"""Room: what the ranks wish for after a step, and when all of them know it.

An answer that is waited for at once makes each step as long as the slowest rank's. Which rank that is changes: hosts that
launch work for a device need a tenth more or less from step to step, and over two steps much of that evens out. So what a rank
wishes for after a step is heard by all, itself included, after the next one. Two things need no such delay: what every rank
wishes for holds at once, and where all know that they meet anyway they hear everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._before: Pending | None = None

    def now(self, mine: Wishes) -> Wishes:
        """What any rank wishes for, or has wished for since the last answer. Waits for all."""
        earlier, later = self.heard(), _any(self._ask(mine))
        return Wishes(*map(max, earlier, later))

    def heard(self) -> Wishes:
        """What any rank wished for when `ask` was called last."""
        before, self._before = self._before, None
        return Wishes() if before is None else _any(before)

    def ask(self, mine: Wishes) -> Wishes:
        """Wish for something, to be `heard` next time. Returns what holds at once: leaving and ending, where all wish for it.

        Waits for the others only where this rank itself wishes to leave or to end.
        """
        self._before = self._ask(mine)
        if not (mine.leave or mine.end):
            return Wishes()
        leave, end = (not unwilling for unwilling in self._before.wait()[len(Wishes._fields) :])
        return Wishes(leave=leave, end=end)

    def _ask(self, mine: Wishes) -> Pending:
        return self._comm.start_any([*mine, not mine.leave, not mine.end])


def _any(pending: Pending) -> Wishes:
    return Wishes(*map(bool, pending.wait()[: len(Wishes._fields)]))
