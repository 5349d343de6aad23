"""Durations of training and their units."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.config import Duration, Unit
from worldsize.errors import ConfigError

UNITS = st.sampled_from(get_args(Unit))


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("500st", 500, "st"),
        ("10 epochs", 10, "ep"),
        ("1 Epoch", 1, "ep"),
        ("2.5Mtok", 2_500_000, "tok"),
        ("1k samples", 1000, "sa"),
        ("1_000 steps", 1000, "st"),
        ("3ttok", 3 * 10**12, "tok"),
        ("2tok", 2, "tok"),
        ("0ep", 0, "ep"),
        ("7.0ep", 7, "ep"),
    ],
)
def test_words_and_scales(text: str, count: int, unit: Unit) -> None:
    """A number, a scale and a unit, long or short, in any case."""
    assert Duration.parse(text) == Duration(count, unit)


@pytest.mark.parametrize(
    "text", ["", "500", "ep", "-1ep", "1e3st", "ten steps", "5 minutes", "1__0st", "1.st", "inf ep"]
)
def test_no_unit_or_number_is_refused(text: str) -> None:
    """What has no unit, or no plain number, is refused with the units to choose from."""
    with pytest.raises(ConfigError, match="500st") as caught:
        Duration.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0.5ep", "1.0005ksa", "2.5 steps"])
def test_half_a_step_is_refused(text: str) -> None:
    """A length that is no whole number of its unit is refused, not rounded."""
    with pytest.raises(ConfigError, match="not a whole number"):
        Duration.parse(text)


def test_a_bare_number_is_refused() -> None:
    """A number from YAML, without a unit, gets the same help as text."""
    with pytest.raises(ConfigError, match="has no unit"):
        Duration.parse(500)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "unit"), [(-1, "st"), (1, "hours")])
def test_a_duration_is_checked_when_made(count: int, unit: Unit) -> None:
    """Minus one is no sign for "without limit", and units are those of the grammar."""
    with pytest.raises(ConfigError, match="not a length of training"):
        Duration(count, unit)


@given(st.integers(min_value=0, max_value=10**30), UNITS)
def test_text_and_back(count: int, unit: Unit) -> None:
    """For any duration, its text reads as itself, without rounding."""
    duration = Duration(count, unit)
    assert Duration.parse(str(duration)) == duration
    assert Duration.parse(duration) is duration


@given(st.integers(0, 10**6), st.integers(0, 999), UNITS)
def test_decimals_are_exact(whole: int, thousandths: int, unit: Unit) -> None:
    """For any number with three decimals, the scale k gives exactly its thousandths: 1.1k is 1100."""
    assert Duration.parse(f"{whole}.{thousandths:03}k{unit}") == Duration(1000 * whole + thousandths, unit)


@given(st.text(max_size=20) | st.from_regex(r"\s*[0-9._]{0,6}\s?[kmbtKMBT]?\s?[a-z]{0,8}", fullmatch=True))
def test_any_text_is_a_duration_or_an_error(text: str) -> None:
    """For any text, the answer is a duration or a ConfigError, never something else."""
    with contextlib.suppress(ConfigError):
        assert Duration.parse(text).count >= 0
