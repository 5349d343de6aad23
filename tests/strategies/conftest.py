"""Room: ranks that stay for all tests of strategies, so that torch is imported once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from worldsize.runtime import session
from worldsize.testing.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def one() -> Iterator[RankPool]:
    """A process of its own."""
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two() -> Iterator[RankPool]:
    """Two gloo ranks."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three() -> Iterator[RankPool]:
    """Three gloo ranks."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    """Four gloo ranks."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def here() -> Iterator[None]:
    """This process as a world of one."""
    yield
    session.close()
