"""Room: the ranks that tests share: one set of processes for each world size, for as long as they are light."""

from __future__ import annotations

import atexit
import os
import signal
from contextlib import suppress
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
    """Ranks that stand still between calls, and that the next finds made anew where the last left too many threads behind.

    What torch and DeepSpeed keep of worlds that are gone never rests: eight such ranks took a third of a core for nothing.
    """

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 120.0, **named: Any) -> list[T]:
        """See `run_ranks`."""
        self._send(signal.SIGCONT)
        found = super().run(fn, *args, timeout=timeout, **named)
        if any(len(list(Path(f"/proc/{pid}/task").iterdir())) > HEAVY for pid in self.pids):
            self.close()
        self._send(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """See `RankPool`: ranks that stand still would not hear of it."""
        self._send(signal.SIGCONT)
        super().close()

    def _send(self, number: int) -> None:
        """A signal to all ranks, as far as they are started."""
        if self.pids:
            with suppress(ProcessLookupError):
                os.killpg(self.pids[0], number)


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
