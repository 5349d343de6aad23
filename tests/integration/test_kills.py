"""SIGKILL at any instant: nothing that was committed is lost, and the end is as if nothing had happened. Promise 2."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration import program
from worldsize.checkpoint import load, manifest
from worldsize.runtime.comm import Alone
from worldsize.testing.faults import half_written, kill_after, kill_in_save
from worldsize.testing.nursery import Crew
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "100000st"
TRAINING = 4.0
"""Seconds of training, a step and a save several times in each, over which kills fall."""
SAVING = 0.05
"""Seconds that a save takes here, roughly."""


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint: weights, optimizer, average."""
    path = manifest.committed(run_dir)[-1]
    found = {name: torch.empty(fact.shape, dtype=fact.dtype) for name, fact in load.metadata(path).items()}
    load.load(path, found, Alone())
    return found


def newest(run_dir: Path) -> int:
    """The step of the newest committed checkpoint, 0 before the first."""
    return max((manifest.step_of(path) or 0 for path in manifest.committed(run_dir)), default=0)


class Victim:
    """A run that is started and killed again and again, and where the kills hit: "start-up", "training", "save"."""

    def __init__(self, layout: str, folder: Path, draw: random.Random) -> None:
        self.layout, self.run_dir, self.logs, self.draw = layout, folder / "killed", folder / "logs", draw
        self.hits: Counter[str] = Counter()
        self.starting = 0.0
        """Seconds from the start of an attempt to its first step, when it was last seen."""

    def kill(self, where: str) -> None:
        """One attempt that is killed in a save, in its training, or anywhere. Checks what it left."""
        before = newest(self.run_dir)
        begun = self.begun
        crew = Crew(program.ranks_of(self.layout), self.logs)
        crew.start(program.endure, self.run_dir, self.layout, ENDLESS)
        if where == "anywhere":
            hit = kill_after(crew, self.draw.uniform(0, self.starting + TRAINING))
        else:
            self.wait(crew, begun)
            hit = (
                kill_in_save(crew, self.run_dir, self.draw.uniform(0, SAVING))
                if where == "save"
                else kill_after(crew, self.draw.uniform(0, TRAINING))
            )
        assert hit, f"it ended: {crew.said()}"
        assert set(crew.codes()) == {-9}, crew.said()
        crew.close()
        for path in manifest.committed(self.run_dir):
            assert manifest.verify(path) == []
        assert newest(self.run_dir) >= before
        trained = "save" if half_written(self.run_dir) else "training"
        self.hits[trained if self.begun > begun else "start-up"] += 1

    def wait(self, crew: Crew, begun: int) -> None:
        """Until this attempt trains."""
        began = time.monotonic()
        while self.begun == begun:
            assert None in crew.codes(), crew.said()
            assert time.monotonic() < began + 120, crew.said()
            time.sleep(0.005)
        self.starting = time.monotonic() - began

    @property
    def begun(self) -> int:
        """How many attempts came as far as their first step."""
        return sum(row["event"] in ("start", "resume") for row in read(self.run_dir / "events.jsonl"))


def survive(layout: str, folder: Path, kills: int) -> None:
    """Kill the run that often; then let it end, and compare with an undisturbed one."""
    victim = Victim(layout, folder, random.Random(f"{layout} {kills}"))
    for number in range(kills):
        victim.kill(("save", "training", "anywhere")[number % 3])
    while victim.hits["save"] < kills / 3:  # a commit may come between the last look and the signal
        victim.kill("save")
    assert victim.hits["save"] + victim.hits["training"] >= 2 * kills / 3, victim.hits
    steps = newest(folder / "killed") + 7
    for name in ("killed", "straight"):
        crew = Crew(program.ranks_of(layout), folder / f"logs-{name}")
        crew.start(program.endure, folder / name, layout, f"{steps}st")
        codes = crew.wait(900)
        crew.close()
        assert codes == [0] * crew.size, crew.said()
    assert newest(folder / "killed") == newest(folder / "straight") == steps
    program.same(tensors(folder / "straight"), tensors(folder / "killed"))


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:3"])
def test_a_run_survives_being_killed(tmp_path: Path, layout: str) -> None:
    """B056: killed in a save, in training and anywhere; the same bits in the end."""
    survive(layout, tmp_path, 3)


@pytest.mark.matrix
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:3"])
def test_a_run_survives_a_hundred_kills(tmp_path: Path, layout: str) -> None:
    """At random instants: a third of them in a save, and two thirds at least after the first step."""
    survive(layout, tmp_path, 100)
