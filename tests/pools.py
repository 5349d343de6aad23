"""Room: the ranks that tests share: one set of processes for each world size, for as long as they are light."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from worldsize.runtime import session
from worldsize.testing.nursery import nursery
from worldsize.testing.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
HEAVY = 60
"""Threads of a rank: torch and DeepSpeed keep process groups of worlds that are gone, and gloo's threads never rest."""


class Pool(RankPool):
    """Ranks that the next call finds made anew where the last one left too many threads behind."""

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 120.0, **named: Any) -> list[T]:
        """See `run_ranks`."""
        found = super().run(fn, *args, timeout=timeout, **named)
        if any(len(list(Path(f"/proc/{pid}/task").iterdir())) > HEAVY for pid in self.pids):
            self.close()
        return found


@cache
def pool(size: int) -> RankPool:
    """`size` gloo ranks."""
    nursery()  # exits run backwards: the pools end before it
    made = Pool(size)
    atexit.register(made.close)
    return made


def together(function: Callable[..., T], size: int, *args: Any, device: str = "cpu") -> list[T]:
    """What `function(comm, *args)` returns on each of `size` ranks that have met."""
    return pool(size).run(_meet, function, device, *args)


def _meet(function: Callable[..., T], device: str, *args: Any) -> T:
    return function(session.session(device).comm, *args)
