from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.data.packing import pack
from worldsize.errors import DataError


@given(st.data(), st.integers(1, 50))
def test_each_item_once_and_no_row_too_full(data: st.DataObject, capacity: int) -> None:
    """Whatever the lengths."""
    sizes = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), dtype=np.int64)
    items, starts = pack(sizes, capacity)
    assert sorted(items.tolist()) == list(range(len(sizes)))
    rows = [sizes[items[a:b]].sum() for a, b in itertools.pairwise(starts)]
    assert all(0 < row <= capacity for row in rows)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_never_more_than_the_bound_of_best_fit_decreasing(sizes: list[int]) -> None:
    """11/9 of the fewest possible rows, and 4 (Johnson, 1974)."""
    _, starts = pack(sizes, 20)
    assert len(starts) - 1 <= 11 / 9 * -(-sum(sizes) // 20) + 4 + _heavy(sizes)


def _heavy(sizes: list[int]) -> int:
    """How far the sum understates the fewest rows: items of more than half a row share with none like them."""
    return max(0, sum(2 * size > 20 for size in sizes) - -(-sum(sizes) // 20)) * 2


def test_texts_fill_rows() -> None:
    """Lengths as texts have them leave less than a percent of the rows empty."""
    sizes = np.random.default_rng(0).lognormal(5, 1, 20_000).clip(1, 2048).astype(int)
    _, starts = pack(sizes, 2048)
    assert sizes.sum() / 2048 / (len(starts) - 1) > 0.99


def test_what_does_not_fit_is_refused() -> None:
    """With the lengths."""
    with pytest.raises(DataError, match="lengths 1 to 9, rows of 8"):
        pack([1, 9], 8)
