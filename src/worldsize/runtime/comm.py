"""Room: what bookkeeping needs of the other ranks. Small host-side values over a gloo group, never tensors of the model.

Everything that steers training (stop, save, best, next step, digests) is agreed here, so that it neither waits for
the device nor mixes with the collectives of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from worldsize.errors import WorldsizeError
from worldsize.runtime.board import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worldsize.runtime.board import Board

T = TypeVar("T")
U = TypeVar("U")


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> list[float]:
        """The reduced values. Blocks until every rank has given its own."""
        ...


class Comm(Protocol):
    """Agreement between ranks. Every method is called by all ranks in the same order.

    Attributes:
        rank: this rank in the group.
        size: how many ranks there are.
        group: the gloo process group, or None where this process is alone (as torch's checkpoint functions want it).
    """

    rank: int
    size: int
    group: Any

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        ...

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks, in float64."""
        ...

    def start_sum(self, values: Sequence[float]) -> Pending:
        """Like `sum`, without waiting."""
        ...

    def start_max(self, values: Sequence[float]) -> Pending:
        """Like `max`, without waiting."""
        ...

    def start_any(self, wishes: Sequence[bool]) -> Pending:
        """For each of at most 8 wishes, whether any rank has it (1.0 or 0.0), without waiting."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        ...

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of rank `source`, on every rank."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def fork(self) -> Comm:
        """A second channel between the same ranks, for a background thread. Collective; close it with `close`."""
        ...

    def close(self) -> None:
        """Give the group back. The object is not used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready:
    values: list[float]

    def wait(self) -> list[float]:
        return self.values


@dataclass(slots=True)
class Alone:
    """The world of one: every agreement is already there."""

    rank: int = field(default=0, init=False)
    size: int = field(default=1, init=False)
    group: Any = field(default=None, init=False)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return [float(value) for value in values]

    max = sum

    def start_sum(self, values: Sequence[float]) -> Pending:
        """The values themselves."""
        return _Ready(self.sum(values))

    start_max = start_any = start_sum

    def gather(self, value: T) -> list[T]:
        """One value."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value itself."""
        assert source == 0
        return value

    def barrier(self) -> None:
        """Nobody to wait for."""

    def fork(self) -> Alone:
        """Another one of these."""
        return Alone()

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(slots=True)
class _Reduction:
    work: Any
    tensor: Any

    def wait(self) -> list[float]:
        self.work.wait()
        values: list[float] = self.tensor.tolist()
        return values


class Ranks:
    """Agreement over a gloo group of torch.distributed.

    Args:
        group: a gloo process group over all ranks of the default group.
        timeout: how long an agreement may take before it is an error; used for forks too.

    Attributes:
        board: a faster way for yes or no and for a few numbers, where all ranks are on one host.
    """

    board: Board | None = None

    def __init__(self, group: Any, timeout: timedelta) -> None:
        import torch.distributed as dist

        self.group, self._timeout = group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self.start_sum(values).wait()

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks, in float64."""
        return self.start_max(values).wait()

    def start_sum(self, values: Sequence[float]) -> Pending:
        """Like `sum`, without waiting."""
        if self.board is not None and len(values) <= MOST:
            return self.board.add(values)
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.SUM)

    def start_max(self, values: Sequence[float]) -> Pending:
        """Like `max`, without waiting."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.MAX)

    def start_any(self, wishes: Sequence[bool]) -> Pending:
        """For each wish whether any rank has it, without waiting."""
        return self.start_max([float(wish) for wish in wishes]) if self.board is None else self.board.ask(wishes)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of rank `source`, on every rank."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.sum([0.0])

    def fork(self) -> Ranks:
        """A second channel between the same ranks."""
        import torch.distributed as dist

        # A save on a slow disk may take hours; a dead peer still shows at once, by its closed connection.
        timeout = max(self._timeout, timedelta(days=1))
        return Ranks(dist.new_group(backend="gloo", timeout=timeout), timeout)

    def close(self) -> None:
        """Give the group back."""
        import torch.distributed as dist

        dist.destroy_process_group(self.group)

    def _reduce(self, values: Sequence[float], operation: Any) -> Pending:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
        return _Reduction(dist.all_reduce(tensor, op=operation, group=self.group, async_op=True), tensor)


def on_one(comm: Comm, make: Callable[[], T], otherwise: U) -> T | U:
    """One process of the world gets the real thing, the others the substitute: nobody has to ask who it is."""
    return make() if comm.rank == 0 else otherwise


def decide(comm: Comm, make: Callable[[], T]) -> T:
    """One process decides or does something, all get its value, or raise its error. Collective.

    Raises:
        WorldsizeError: what `make` raised there; other exceptions are raised there and reported elsewhere.
    """
    outcome: tuple[Any, WorldsizeError | None] = (None, None)
    own: Exception | None = None
    if comm.rank == 0:
        try:
            outcome = make(), None
        except WorldsizeError as error:
            outcome = None, error
        except Exception as error:  # noqa: BLE001 - told to the others first, then raised as it is
            own, outcome = error, (None, WorldsizeError(f"rank 0 failed: {type(error).__name__}: {error}"))
    value, refusal = comm.broadcast(outcome)
    if own is not None:
        raise own
    if refusal is not None:
        raise refusal
    found: T = value
    return found
