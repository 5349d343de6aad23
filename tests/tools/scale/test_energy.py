"""Joules between two times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from worldsize.tools.scale.energy import Energy, _Processors

if TYPE_CHECKING:
    from pathlib import Path


def test_power_is_summed_up_over_time() -> None:
    """At a constant power, watts times seconds."""
    with Energy(lambda: 7.0) as energy:
        begin = time.time() + 0.1
        time.sleep(1.3)
        end = time.time()
    assert energy.between(begin, end) == pytest.approx(7.0 * (end - begin), rel=0.01)
    assert energy.between(begin - 60, end) is None


def test_where_nobody_tells_there_is_no_number() -> None:
    """Not zero."""
    with Energy(lambda: None) as energy:
        begin = time.time()
    assert energy.between(begin, time.time()) is None


def test_a_counter_that_wraps_around_goes_on(tmp_path: Path) -> None:
    """Of two packages; a zone inside of one counts once."""
    for name, value in (("intel-rapl:0", 900_000), ("intel-rapl:1", 0), ("intel-rapl:0:0", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(str(value))
        (tmp_path / name / "max_energy_range_uj").write_text("999999")
    processors = _Processors(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100000")
    began = time.monotonic()
    time.sleep(0.2)
    watts = processors()
    assert watts is not None
    assert watts * (time.monotonic() - began) == pytest.approx(0.2, rel=0.05)
