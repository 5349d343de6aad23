"""SIGKILL at any instant: nothing that was committed is lost, and the end is as if nothing had happened. Promise 2."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration import program
from worldsize.checkpoint import load, manifest
from worldsize.runtime.comm import Alone
from worldsize.testing.faults import kill_after, kill_in_save
from worldsize.testing.nursery import Crew

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "100000st"
LONGEST = 2.5
"""Seconds that an attempt lives at most: some die while they start, some after several steps."""
SAVING = 0.02
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


def killed(layout: str, run_dir: Path, logs: Path, duration: str, draw: random.Random, *, aimed: bool) -> bool:
    """One attempt that is killed. Checks what it left. False where it ended before."""
    before = newest(run_dir)
    crew = Crew(program.ranks_of(layout), logs)
    crew.start(program.endure, run_dir, layout, duration)
    hit = (
        kill_in_save(crew, run_dir, draw.uniform(0, SAVING)) if aimed else kill_after(crew, draw.uniform(0, LONGEST))
    )
    assert set(crew.codes()) <= ({-9} if hit else {-9, 0}), crew.said()
    crew.close()
    for path in manifest.committed(run_dir):
        assert manifest.verify(path) == []
    assert newest(run_dir) >= before
    return hit


def survive(layout: str, folder: Path, kills: int) -> None:
    """Kill the run that often, every third time in a save; then let it end, and compare with an undisturbed one."""
    draw = random.Random(f"{layout} {kills}")
    for number in range(kills):
        assert killed(layout, folder / "killed", folder / "logs", ENDLESS, draw, aimed=number % 3 == 0), "it ended"
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
    """B056: three kills of each layout, in saves and elsewhere; the same bits in the end."""
    survive(layout, tmp_path, 3)


@pytest.mark.matrix
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:3"])
def test_a_run_survives_a_hundred_kills(tmp_path: Path, layout: str) -> None:
    """Uniformly random instants, a third of them in a save."""
    survive(layout, tmp_path, 100)
