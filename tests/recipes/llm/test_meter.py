"""How fast a training is said to be."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from worldsize.recipes.llm.meter import Meter
from worldsize.runtime.comm import Alone

PAUSE_S = 0.4


def test_an_evaluation_is_not_training() -> None:
    """Its time does not count; that of a step does."""
    meter = Meter(1.0, 1, torch.device("cpu"))
    meter.add(100.0)
    time.sleep(PAUSE_S / 4)
    with meter.paused():
        time.sleep(PAUSE_S)
    speed = meter.read(Alone())["tokens_per_second_per_device"]
    assert 100.0 / PAUSE_S < speed < 100.0 / (PAUSE_S / 4)


def test_memory_is_that_of_the_host_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that the process has had, as the system counts it: in units of 1,024 bytes."""
    monkeypatch.setattr("worldsize.recipes.llm.meter.sys.platform", "linux")
    usage = SimpleNamespace(ru_maxrss=5_000_000)
    monkeypatch.setattr("worldsize.recipes.llm.meter.resource.getrusage", lambda _: usage)
    assert Meter(1.0, 1, torch.device("cpu")).read(Alone())["memory_gb"] == pytest.approx(5.12)


def test_the_fullest_rank_counts() -> None:
    """Stages of a pipeline differ."""

    class Other(Alone):
        def max(self, values: object) -> list[float]:
            del values
            return [77.0]

    assert Meter(1.0, 2, torch.device("cpu")).read(Other())["memory_gb"] == pytest.approx(77.0)
