"""Room: a process that poses as one rank of a world that is not here: its session, agreements that are there at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from worldsize.runtime import env, session
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldsize.runtime.comm import Pending

T = TypeVar("T")


@dataclass(slots=True)
class _Sum:
    values: list[float]

    def wait(self) -> list[float]:
        return self.values


@dataclass(slots=True)
class Alike:
    """All ranks have what this one has. It is the one that decides, wherever in the grid it stands."""

    size: int
    rank: int = field(default=0, init=False)
    group: Any = field(default=None, init=False)
    board: Any = field(default=None, init=False)

    def sum(self, values: Sequence[float]) -> list[float]:
        """So many times the values."""
        return [float(value) * self.size for value in values]

    def max(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return [float(value) for value in values]

    def start_sum(self, values: Sequence[float]) -> Pending:
        """As `sum`."""
        return _Sum(self.sum(values))

    def start_max(self, values: Sequence[float]) -> Pending:
        """As `max`."""
        return _Sum(self.max(values))

    start_any = start_max

    def gather(self, value: T) -> list[T]:
        """The value, so many times."""
        return [value] * self.size

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value."""
        del source
        return value

    def barrier(self) -> None:
        """Nobody to wait for."""

    def fork(self) -> Alone:
        """A world of one: what a thread beside the training agrees on is not planned."""
        return Alone()

    def close(self) -> None:
        """Nothing to give back."""


def pose(rank: int, ranks: int, local: int) -> None:
    """Become this rank among so many, of which `local` share a node; on the CPU, with collectives that go nowhere."""
    node, local_rank = divmod(rank, local)
    said = {
        "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": ranks // local, "MASTER_PORT": 29500,
    }  # fmt: skip
    env.export(
        {name: str(value) for name, value in said.items()} | {"MASTER_ADDR": "planned", "WORLDSIZE_LAUNCHER": ""}
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    comm: Any = Alone() if ranks == 1 else Alike(ranks)
    session._open = session.Session(env.here(), torch.device("cpu"), comm, timedelta(minutes=10))  # noqa: SLF001
