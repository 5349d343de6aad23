"""The tournament of pairs."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from worldsize.tools.doctor.rounds import tournament


@given(st.integers(0, 40))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    """In as few rounds as can be."""
    rounds = tournament(range(count))
    assert sorted(tuple(sorted(pair)) for pair in chain(*rounds)) == list(combinations(range(count), 2))
    assert all(len({*chain(*pairs)}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == (0 if count < 2 else count - 1 + count % 2)
