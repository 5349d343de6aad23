"""Room: the shared ranks by their number, and this process as a world of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.pools import pool
from worldsize.runtime import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.testing.ranks import RankPool


@pytest.fixture(scope="session")
def one() -> RankPool:
    """A process of its own."""
    return pool(1)


@pytest.fixture(scope="session")
def two() -> RankPool:
    """Two gloo ranks."""
    return pool(2)


@pytest.fixture(scope="session")
def three() -> RankPool:
    """Three gloo ranks."""
    return pool(3)


@pytest.fixture(scope="session")
def four() -> RankPool:
    """Four gloo ranks."""
    return pool(4)


@pytest.fixture
def here() -> Iterator[None]:
    """This process as a world of one."""
    yield
    session.close()
