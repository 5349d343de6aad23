"""A run whose saves take longer than a stop signal leaves begins its last one before the scheduler ends it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import pytest

from tests.train import small
from worldsize.checkpoint import manifest
from worldsize.runtime import signals
from worldsize.train import commit

if TYPE_CHECKING:
    from pathlib import Path

    import worldsize as ws
    from worldsize.train.step import Step


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint."""
    return manifest.step_of(manifest.committed(folder)[-1])


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds before the end at which a run stops: long enough that a slow machine trains a step before."""
    monkeypatch.setattr(commit, "_SPARE_S", 600.0)
    return 600.0


def test_a_run_stops_by_itself_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: float, capfd: pytest.CaptureFixture[str]
) -> None:
    """After its first save it knows; it commits, says why, and leaves with the code to start it again, from that step."""
    monkeypatch.setenv(signals.END_TIME, str(int(time.time() + spare - 60)))
    first = len(small.train(tmp_path, saving=small.OFTEN, duration="100ep"))
    stopped = newest(tmp_path)
    assert stopped
    assert stopped in (first, first + 1)
    assert f"stopped at step {stopped} (time limit); start again to go on" in capfd.readouterr().err
    monkeypatch.delenv(signals.END_TIME)
    assert len(small.train(tmp_path, duration="100ep")) == 300 - stopped


@pytest.mark.parametrize("end", ["", "Unknown", "4000000000"])
def test_a_run_with_time_left_goes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Years are left, or nobody says when the end is."""
    monkeypatch.setenv(signals.END_TIME, end)
    assert len(small.train(tmp_path, saving=small.OFTEN)) == 6


def test_the_slowest_save_tells_how_much_time_the_last_one_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour is left: enough after a save of a second, too little after one of forty minutes, or between steps of thirty."""
    monkeypatch.setenv(signals.END_TIME, str(int(time.time()) + 3600))
    asked = []

    def after(run: ws.Run, _: Step) -> None:
        assert run._loop is not None
        committer = run._loop.committer
        for seconds, step in ((0.0, 1.0), (1.0, 1.0), (2400.0, 1.0), (1.0, 1800.0)):
            committer.checkpointer.slowest, committer.taken = seconds, deque([step])
            asked.append(committer.must_end)
        committer.checkpointer.slowest = 0.0

    small.train(tmp_path, after, duration="1ep")
    assert asked[:4] == [False, False, True, True]
