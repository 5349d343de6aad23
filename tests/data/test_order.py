"""What an order promises."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldsize.data.order import Order


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(0, 6000))
@settings(max_examples=60)
def test_an_epoch_holds_every_sample_once(seed: int, epoch: int, length: int) -> None:
    """For any seed, epoch and length the order is a permutation of range(length)."""
    assert sorted(Order(seed, epoch, length).ids(0, length)) == list(range(length))


@given(st.integers(1, 10**15), st.data())
def test_pieces_are_slices_of_the_whole(length: int, data: st.DataObject) -> None:
    """`ids`, however it is cut, and `[]` tell the same order."""
    start = data.draw(st.integers(0, length - 1))
    stop = min(start + data.draw(st.integers(1, 3000)), length)
    cut = data.draw(st.integers(start, stop))
    order, other = Order(1, 2, length), Order(1, 2, length)
    whole = order.ids(start, stop)
    assert other.ids(cut, stop) == whole[cut - start :]
    assert other.ids(start, cut) == whole[: cut - start]
    assert order[start] == whole[0]
    assert len(set(whole)) == stop - start


def test_unshuffled_is_the_identity() -> None:
    """shuffle=False keeps the dataset's order, at any length."""
    assert Order(3, 4, 10**12, shuffle=False).ids(10**11, 10**11 + 3) == [10**11, 10**11 + 1, 10**11 + 2]


def test_orders_are_the_same_for_ever() -> None:
    """These numbers are a contract: a resumed run must find them again under every version."""
    assert Order(0, 0, 10).ids(0, 10) == [4, 1, 7, 3, 6, 5, 2, 9, 8, 0]
    assert Order(0, 1, 5000).ids(0, 4) == [1220, 2561, 1475, 2596]
    assert Order(0, 0, 10**12).ids(10**6, 10**6 + 2) == [739757889114, 482973403194]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_short_orders_are_uniform_over_all_permutations(length: int) -> None:
    """Each permutation of a tiny dataset comes equally often (chi-square, 6 sigma)."""
    expected, kinds = 100, math.factorial(length)
    found = Counter(tuple(Order(seed, 0, length).ids(0, length)) for seed in range(expected * kinds))
    chi = sum((found[each] - expected) ** 2 / expected for each in found) + expected * (kinds - len(found))
    assert chi < kinds - 1 + 6 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("length", [7, 1024, 1025, 5000, 10**12])
def test_every_position_is_uniform_over_seeds(length: int) -> None:
    """The sample at a fixed position falls in each tenth of the dataset equally often (chi-square, 6 sigma)."""
    bins = min(length, 10)
    for position in (0, 1, length // 2, length - 1):
        found = Counter(Order(seed, 3, length)[position] * bins // length for seed in range(1000))
        weights = np.bincount(np.arange(length) * bins // length, minlength=bins) / length if length < 10**4 else None
        share = [1 / bins] * bins if weights is None else weights.tolist()
        chi = sum((found[each] - 1000 * share[each]) ** 2 / (1000 * share[each]) for each in range(bins))
        assert chi < bins - 1 + 6 * math.sqrt(2 * (bins - 1)), position


@pytest.mark.parametrize("length", [1000, 5000, 100_003, 10**9])
def test_neighbours_are_unrelated(length: int) -> None:
    """Consecutive positions, and the same position in consecutive epochs, are uncorrelated (5 sigma)."""
    count = min(length, 20_000)
    here = np.array(Order(9, 0, length).ids(0, count), dtype=float)
    there = np.array(Order(9, 1, length).ids(0, count), dtype=float)
    for one, other in ((here[:-1], here[1:]), (here, there), (here, np.arange(count, dtype=float))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(count)


def test_a_shuffle_has_about_one_fixed_point() -> None:
    """Over many epochs the mean number of fixed points of a permutation is 1, at tiny and larger lengths."""
    for length in (10, 2000):
        fixed = [sum(at == each for at, each in enumerate(Order(1, e, length).ids(0, length))) for e in range(400)]
        assert abs(np.mean(fixed) - 1) < 5 / math.sqrt(400)


def test_a_huge_order_costs_nothing() -> None:
    """10**12 samples: the first batch, and one from the middle, take 1 MB and 10 ms of work (measured: 0.4 ms)."""

    def took() -> float:
        begun = time.thread_time()
        order = Order(0, 0, 10**12)
        order.ids(0, 256)
        order.ids(5 * 10**11, 5 * 10**11 + 256)
        return time.thread_time() - begun

    assert min(took() for _ in range(3)) < 0.01
    tracemalloc.start()
    took()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10**6


def test_positions_outside_are_refused() -> None:
    """A position outside the epoch is an IndexError with the numbers."""
    with pytest.raises(IndexError, match="positions 8 to 11 of an epoch of 10 samples"):
        Order(0, 0, 10).ids(8, 11)
    with pytest.raises(IndexError):
        Order(0, 0, 10)[-1]
    with pytest.raises(ValueError, match="2\\*\\*62"):
        Order(0, 0, 2**63)
