"""When a training counts as stuck: what may take how long, told by what is done."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from worldsize.runtime.clock import COMPUTE, DATA, EVALUATION, SAVE, Clock
from worldsize.runtime.comm import Alone
from worldsize.testing.nursery import Crew
from worldsize.train.pulse import Pulse
from worldsize.train.settings import Stall
from worldsize.train.watchdog import Watchdog

RULES = Stall(times=10, floor=60, first=1000, data=300, evaluation=600, save=900)


@dataclass
class Rank:
    """What a watchdog looks at."""

    pulse: Pulse = field(default_factory=Pulse)
    clock: Clock = field(default_factory=Clock)
    comm: Alone = field(default_factory=Alone)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    said: list[str] = field(default_factory=list)


class Watch:
    """A watchdog whose time a test moves."""

    def __init__(self, folder: Path, rules: Stall = RULES) -> None:
        self.rank, self.said = Rank(), list[str]()
        engine: Any = self.rank
        self.dog = Watchdog(rules, engine, folder, self.said.append)
        self.now = self.dog._looked

    def go(self, seconds: float, *, step: int | None = None, phase: int = COMPUTE) -> list[str]:
        """Look as often as it does, for so long. Returns what was said."""
        self.rank.pulse.step = self.rank.pulse.step if step is None else step
        self.rank.clock.phase = phase
        end = self.now + seconds
        while self.now < end:
            self.now += self.dog._tick
            self.dog._look(self.now)
        found = list(self.said)
        self.said.clear()
        return found

    def steps(self, seconds: float, count: int = 20) -> list[str]:
        """That many steps of that length."""
        first = self.rank.pulse.step + 1
        return [line for number in range(count) for line in self.go(seconds, step=first + number)]


def test_a_stop_is_told_after_ten_usual_steps(tmp_path: Path) -> None:
    """Or after the floor, where steps are short; the usual one is learned from the run."""
    for length, quiet, told in ((0.1, 55, 60), (20, 190, 60)):
        watch = Watch(tmp_path / str(length))
        assert watch.steps(max(length, 5)) == []
        assert watch.go(quiet if length > 5 else 50, step=99) == []
        assert len(watch.go(told)) == 1, length


@pytest.mark.parametrize(("phase", "quiet"), [(DATA, 290), (EVALUATION, 590), (SAVE, 890)])
def test_what_takes_long_may(tmp_path: Path, phase: int, quiet: float) -> None:
    """Each in its own time."""
    watch = Watch(tmp_path)
    watch.steps(5)
    assert watch.go(quiet, phase=phase) == []
    assert len(watch.go(60, phase=phase)) == 1


def test_first_steps_may_take_longer(tmp_path: Path) -> None:
    """They compile."""
    watch = Watch(tmp_path)
    assert watch.go(900, step=0) == []
    assert watch.go(900, step=1) == []
    assert len(watch.go(200)) == 1


def test_an_evaluation_that_moves_on_is_none(tmp_path: Path) -> None:
    """However long it is: each of its batches counts."""
    watch = Watch(tmp_path)
    watch.steps(5)
    for _ in range(10):
        watch.rank.pulse.beat += 1
        assert watch.go(500, phase=EVALUATION) == []


def test_it_is_said_seldom_and_its_end_once(tmp_path: Path) -> None:
    """Again when it has lasted twice as long."""
    watch = Watch(tmp_path)
    watch.steps(5)
    told = watch.go(2000)
    assert 3 <= len(told) <= 6
    assert all("has made no progress since step 19" in line for line in told)
    (over,) = watch.go(5, step=20)
    assert over.startswith("worldsize: the training goes on, after ")
    assert list((tmp_path / "stall").glob("*.json")) == []


def test_who_was_stopped_itself_knows_nothing(tmp_path: Path) -> None:
    """A laptop that slept, a process that went on: time begins anew."""
    watch = Watch(tmp_path)
    watch.steps(5)
    watch.now += 5000
    assert watch.go(50) == []


@pytest.mark.parametrize("problem", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_who_reads_no_more_ends_no_watch(tmp_path: Path, problem: Exception) -> None:
    """What cannot be printed is lost; the next stop is noticed again, and the run is closed."""
    watch = Watch(tmp_path)

    def say(line: str) -> None:
        watch.said.append(line)
        raise problem

    watch.dog._scene = replace(watch.dog._scene, say=say)
    watch.steps(5)
    assert len(watch.go(100)) == 1
    assert watch.go(5, step=20) == ["worldsize: the training goes on, after 40 s"]
    assert len(watch.go(100)) == 1


def leaves() -> None:
    """Nobody holds the run any more, and the program goes on with something else."""
    rank: Any = Rank()
    watch = Watchdog(
        Stall("requeue", floor=0.5, first=0.5, data=0.5, save=0.5, evaluation=0.5), rank, Path(), rank.said.append
    )
    watch.start()
    time.sleep(0.5)
    del rank
    watch._thread.join()
    time.sleep(4)


def test_a_watch_that_is_over_ends_nobody(tmp_path: Path) -> None:
    """Whatever the process does later, and however long."""
    crew = Crew(1, tmp_path)
    crew.start(leaves)
    codes = crew.wait(60)
    crew.close()
    assert codes == [0], crew.said()
