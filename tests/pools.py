"""Room: the ranks that tests share: one set of processes for each world size, for as long as the tests run."""

from __future__ import annotations

import atexit
from functools import cache

from worldsize.testing.nursery import nursery
from worldsize.testing.ranks import RankPool


@cache
def pool(size: int) -> RankPool:
    """`size` gloo ranks."""
    nursery()  # exits run backwards: the pools end before it
    made = RankPool(size)
    atexit.register(made.close)
    return made
