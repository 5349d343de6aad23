"""Room: the places of ranks on a node: which failed again at once and is left out, which device is there no more.

A slot that failed once is tried again; `slot_retries` times more without a new commit, and it is left out, where the node
may have fewer ranks. So a rank that was killed comes back, and a GPU that is broken does not end the run.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import program
from worldsize.launch.verdict import Remedy
from worldsize.runtime import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.launch.failure import Failure
    from worldsize.launch.plan import Plan, Share
    from worldsize.launch.verdict import Report


class Slots:
    """The slots of one node, as who decides sees them: how often each failed since something was committed."""

    def __init__(self, count: int, least: int | None) -> None:
        self._failed, self._least = [0] * count, least

    @property
    def count(self) -> int:
        """How many ranks the node has in the next attempt."""
        return len(self._failed)

    def recount(self, report: Report) -> None:
        """As many as the node says it can start now."""
        if report.nproc is not None:
            self._failed = (self._failed + [0] * report.nproc)[: report.nproc]

    def committed(self) -> None:
        """Something new was committed: what failed before counts no more."""
        self._failed = [0] * self.count

    def leave_out(self, local_rank: int, retries: int) -> bool:
        """Count a failure of this slot. Whether it is left out from now on."""
        if local_rank >= self.count:
            return False
        self._failed[local_rank] += 1
        bad = self._failed[local_rank] > retries and self._least is not None and self.count > self._least
        if bad:
            del self._failed[local_rank]
        return bad


class Tally:
    """The slots of all nodes of an attempt.

    Args:
        retries: how often one is tried again.
        nodes: in the order of their numbers.
    """

    def __init__(self, retries: int, nodes: Sequence[Slots]) -> None:
        self._retries, self.nodes = retries, list(nodes)

    def remedy(self, cause: Failure, /, *, further: bool) -> Remedy:
        """Leave the slot out where it failed again at once."""
        before = [slots.count for slots in self.nodes]
        for slots in self.nodes if further else ():
            slots.committed()
        number, local_rank = placed(cause.rank, before)
        if number is None or not self.nodes[number].leave_out(local_rank, self._retries):
            return Remedy()
        return Remedy(then=f" without that slot, with {ranks(sum(before) - 1)}", excused=True, dropped=cause.rank)


def placed(rank: int | None, counts: Sequence[int]) -> tuple[int | None, int]:
    """Node and local rank of a rank; no node for none."""
    for node, count in enumerate(counts if rank is not None else ()):
        assert rank is not None
        if rank < count:
            return node, rank
        rank -= count
    return None, 0


def ranks(count: int) -> str:
    """A number of ranks in words."""
    return f"{count} rank{'s' if count != 1 else ''}"


@dataclass(slots=True)
class Here:
    """The slots of this node: what is started in them, on which devices."""

    plan: Plan
    environ: Mapping[str, str]
    _devices: list[str] | None = None
    """One a slot, as CUDA_VISIBLE_DEVICES names them; None: ranks here share none."""

    def __post_init__(self) -> None:
        if self.plan.least_nproc is None or self.plan.options.get("WORLDSIZE_DEVICE") == "cpu":
            return
        listed = visible.entries(self.environ.get(visible.VISIBLE))
        count = program.count_gpus(self.environ)
        if count >= self.plan.nproc:
            self._devices = (listed or list(map(str, range(count))))[: self.plan.nproc]

    def change(self, dropped: int | None, share: Share) -> None:
        """After an attempt: leave out the slot of the rank that the verdict names, where it is one of this node.

        Raises:
            LaunchError: fewer are left than this node is to have.
        """
        if dropped is not None and 0 <= dropped - share.first_rank < share.nproc:
            self.leave_out(dropped - share.first_rank)
        least = self.plan.least_nproc
        if least is not None and self.plan.nproc < least:
            raise LaunchError(
                f"{socket.gethostname()} can start only {ranks(self.plan.nproc)} now, and is to have at least {least}",
                found=f"{visible.VISIBLE}={self.plan.options.get(visible.VISIBLE, '')}",
                do="see what became of its GPUs; start it again with a smaller MIN of --nproc-per-node MIN:MAX",
            )

    def leave_out(self, local_rank: int) -> None:
        """The slot of this local rank is used no more."""
        options = dict(self.plan.options)
        if self._devices is not None:
            del self._devices[local_rank]
            options[visible.VISIBLE] = ",".join(self._devices)
        self.plan = replace(self.plan, nproc=self.plan.nproc - 1, options=options)

    def recount(self) -> int | None:
        """How many ranks could start now, where devices are counted and some are gone."""
        if self._devices is None:
            return None
        there = program.installed_gpus()
        gone = [slot for slot, entry in enumerate(self._devices) if entry.isdigit() and int(entry) >= there]
        for slot in reversed(gone):
            self.leave_out(slot)
        return self.plan.nproc if gone else None
