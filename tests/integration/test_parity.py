"""One curve for every layout: promise 1."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.integration import program
from tests.integration.program import LAYOUTS, STEPS_PER_EPOCH, Curve
from tests.pools import pool

SAMPLE = ("ddp:3", "fsdp:2")
REST = tuple(layout for layout in LAYOUTS[1:] if layout not in SAMPLE)
CELLS = [*SAMPLE, *(pytest.param(layout, marks=pytest.mark.matrix) for layout in REST)]


def run(layout: str, **settings: Any) -> Curve:
    """The training in this layout, in a new folder."""
    with TemporaryDirectory() as folder:
        return program.everyone(pool(program.ranks_of(layout)).run(program.train, Path(folder), layout, **settings))


@cache
def single(precision: str, duration: str) -> Curve:
    """What one process does."""
    return run("single:1", precision=precision, duration=duration)


@pytest.mark.parametrize("layout", CELLS)
def test_every_layout_has_one_curve_in_float64(layout: str) -> None:
    """Losses, norms, rates, weights and the average of three epochs agree to 1e-10, and every id exactly."""
    found = run(layout, duration="3ep")
    assert len(found.losses) == 3 * STEPS_PER_EPOCH
    program.close(single("fp64", "3ep"), found, 1e-10)


@pytest.mark.parametrize("layout", CELLS)
def test_every_layout_has_one_curve_in_float32(layout: str) -> None:
    """Twenty steps in float32 agree to 1e-5, as far as rounding lets them."""
    found = run(layout, precision="fp32", duration="20st")
    expected = single("fp32", "20st")
    for step, loss in found.losses.items():
        assert abs(loss - expected.losses[step]) <= 1e-5 * abs(expected.losses[step]), f"step {step}"
    assert found.ids == expected.ids
    assert found.rates == expected.rates


@pytest.mark.parametrize("layout", ["single:1", *CELLS])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_the_same_layout_twice_is_equal_bit_for_bit(layout: str, precision: str) -> None:
    """Nothing depends on time or chance."""
    first, second = (run(layout, precision=precision) for _ in range(2))
    assert (first.losses, first.norms, first.rates) == (second.losses, second.norms, second.rates)
    program.same(first.weights, second.weights)
    program.same(first.average, second.average)


def test_every_sample_is_seen_once_an_epoch() -> None:
    """The ragged last batch included, whatever the ranks."""
    found = run("ddp:3")
    for epoch in range(2):
        ids = [number for step in range(STEPS_PER_EPOCH) for number in found.ids[epoch * STEPS_PER_EPOCH + step]]
        assert sorted(ids) == list(range(program.LENGTH))
