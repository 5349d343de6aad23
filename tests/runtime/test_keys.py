"""What keys promise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worldsize.runtime.keys import key, number

words = st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4)


def test_keys_are_the_same_for_ever() -> None:
    """A key is a fixed function of its words: checkpoints and resumed runs rely on these very numbers."""
    assert key(0) == 11243728523470438572
    assert key(7, "sample", 3, 17) == 12458950919351495730
    assert key(7, "größe\n", -1) == 9358899897216997019


def test_numbers_of_texts_are_the_same_for_ever() -> None:
    """The first weights of models that are filled module by module rely on them."""
    assert number("7 blocks.0") == 1734556054612128682


def test_keys_are_the_same_in_another_process() -> None:
    """Hash randomisation of the interpreter does not reach keys."""
    code = "from worldsize.runtime.keys import key; print(key(3, 'sample', 4, 5))"
    for hashseed in ("1", "2"):
        out = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": hashseed})
        assert int(out) == key(3, "sample", 4, 5)


@given(words, words)
def test_different_words_give_different_keys(one: list[int | str], other: list[int | str]) -> None:
    """No two lists of words share a key, however their texts would join."""
    assert (key(0, *one) == key(0, *other)) == (one == other)


@given(st.integers(0, 2**62))
def test_whole_numbers_count_by_value(value: int) -> None:
    """A numpy integer is the same word as the Python integer of its value."""
    assert key(1, np.int64(value)) == key(1, value)  # type: ignore[arg-type]
    assert 0 <= key(1, value) < 2**64


def test_bits_of_keys_are_balanced() -> None:
    """Over consecutive indices each of the 64 bits is set about half of the time (5 sigma)."""
    found = np.array([key(5, "sample", 0, index) for index in range(4000)], dtype=np.uint64)
    ones = [int(((found >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert max(abs(count - 2000) for count in ones) < 5 * (4000**0.5) / 2
