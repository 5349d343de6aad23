"""From samples seen to the step that comes next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.config import Duration
from worldsize.data.batch import BatchPlan
from worldsize.errors import DataError, LayoutError
from worldsize.train.settings import Settings
from worldsize.train.start import position, shares, steps_in
from worldsize.train.state import Progress

from pathlib import Path  # isort: skip


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 200), st.booleans())
def test_any_step_is_found_by_its_samples(length: int, batch: int, step: int, drop_last: bool) -> None:
    """Ragged and dropped last batches included."""
    plan = BatchPlan(length, batch, batch, drop_last=drop_last and length >= batch)
    assert position(plan, Progress(step=step, samples=plan.samples_before(step))) == step


def test_a_checkpoint_inside_a_step_is_refused_with_the_numbers() -> None:
    """B054: a changed batch that does not fit there."""
    with pytest.raises(LayoutError, match=r"24 samples seen, steps of 10 end at 20 and 30"):
        position(BatchPlan(100, 10, 5), Progress(step=3, samples=24))


def test_a_run_without_steps_is_refused() -> None:
    """B080."""
    with pytest.raises(DataError, match="the run has no steps"):
        steps_in(Settings(Path("run"), 8, 2, Duration(0, "ep")), BatchPlan(20, 8, 2))


@pytest.mark.parametrize(
    ("length", "drop_last", "ranks", "total", "expected"),
    [
        (20, False, 1, None, (4, 2)),
        (20, False, 4, None, (1, 0)),
        (20, False, 4, 2, (1, 1)),
        (20, True, 4, None, (1, 1)),
        (24, False, 3, 9, (2, 1)),
        (None, False, 4, None, (1, 0)),
        (None, True, 4, None, (1, 1)),
    ],
)
def test_shares_are_those_of_full_and_last_steps(
    length: int | None, drop_last: bool, ranks: int, total: int | None, expected: tuple[int, int]
) -> None:
    """Steps of four micro-batches; the last of 20 samples has two, where it is made at all."""
    assert shares(BatchPlan(length, 8, 2, drop_last=drop_last), ranks, total) == expected
