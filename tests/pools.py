"""Room: the ranks that tests share: one set of processes for each world size, for as long as the tests run."""

from __future__ import annotations

import atexit
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from worldsize.runtime import session
from worldsize.testing.nursery import nursery
from worldsize.testing.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@cache
def pool(size: int) -> RankPool:
    """`size` gloo ranks."""
    nursery()  # exits run backwards: the pools end before it
    made = RankPool(size)
    atexit.register(made.close)
    return made


def together(function: Callable[..., T], size: int, *args: Any, device: str = "cpu") -> list[T]:
    """What `function(comm, *args)` returns on each of `size` ranks that have met."""
    return pool(size).run(_meet, function, device, *args)


def _meet(function: Callable[..., T], device: str, *args: Any) -> T:
    return function(session.session(device).comm, *args)
