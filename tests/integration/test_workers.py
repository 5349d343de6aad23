"""A stop that comes to every process of a job, as schedulers send it: the workers that make batches outlast it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import worldsize as ws
from tests.integration import program
from tests.integration.test_parity import single
from worldsize.checkpoint import manifest
from worldsize.testing.nursery import Crew
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 2 * program.STEPS_PER_EPOCH


class Blocking(Dataset[Any]):
    """Samples that never come once a file is there."""

    def __init__(self, block: Path) -> None:
        self._samples, self._block = program.samples(), block

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        while self._block.exists():
            time.sleep(0.1)
        return self._samples[index]


def train(folder: Path, layout: str, method: str, rest: float, duration: str = "2ep") -> None:
    """The training of `program`, fed by two workers; it rests in each step."""
    run = program.make_run(folder / "run", layout, saving=ws.Saving(every="1st"), duration=duration)
    model = run.model(program.Net)
    optimizer = run.optimizer(program.adamw, model, clip=0.5)
    run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, run.total_steps))
    data = DataLoader(
        Blocking(folder / "block"), program.MICRO, shuffle=True, num_workers=2, multiprocessing_context=method
    )
    for step in run.steps(data):
        program.say("step", {"step": rest})
        for x, y in step.micro_batches:
            step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        step.update()


def started(folder: Path, layout: str, *how: Any) -> Crew:
    """The training, its processes in one group."""
    crew = Crew(program.ranks_of(layout), folder / f"logs-{time.monotonic_ns()}")
    crew.start(train, folder, layout, *how)
    return crew


def workers(crew: Crew) -> list[psutil.Process]:
    """The processes that the ranks have started to make batches."""
    found = [child for pid in crew.pids for child in psutil.Process(pid).children()]
    return [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]


def until(crew: Crew, there: Callable[[], bool]) -> None:
    """Wait for it while the ranks work."""
    end = time.monotonic() + 90
    while not there():
        assert None in crew.codes(), crew.said()
        assert time.monotonic() < end, crew.said()
        time.sleep(0.005)


def ended(crew: Crew, code: int, within: float) -> None:
    """All ranks leave in time with this code, and none of their workers is left."""
    left = workers(crew)
    codes, said = crew.wait(within), crew.said()
    assert codes == [code] * crew.size, said
    assert psutil.wait_procs(left, 5)[1] == []
    assert "Traceback" not in said
    crew.close()


def finish(folder: Path, layout: str) -> None:
    """The next start goes on with the very next sample: the curve is that of an undisturbed run."""
    ended(started(folder, layout, "fork", 0.0), 0, 120)
    losses = latest(read(folder / "run" / "metrics.jsonl"), "loss")
    assert losses == pytest.approx(single("fp64", "2ep").losses, rel=1e-10)


@pytest.mark.parametrize(
    ("layout", "method", "number"),
    [("ddp:2", "fork", signal.SIGTERM), ("single:1", "spawn", signal.SIGUSR1)],
)
def test_a_stop_to_all_processes_is_a_stop(tmp_path: Path, layout: str, method: str, number: int) -> None:
    """Everything is committed, the code says 'start me again', and nothing is lost."""
    crew = started(tmp_path, layout, method, 0.2)
    until(crew, lambda: crew.said().count("step") >= 3 * crew.size)
    os.killpg(crew.pids[0], number)
    ended(crew, 75, 30)
    assert 0 < (manifest.step_of(manifest.committed(tmp_path / "run")[-1]) or 0) < STEPS
    finish(tmp_path, layout)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_also_while_the_workers_start(tmp_path: Path, method: str) -> None:
    """A spawned one needs a second until it knows anything of signals."""
    crew = started(tmp_path, "single:1", method, 0.2)
    until(crew, lambda: bool(workers(crew)))
    os.killpg(crew.pids[0], signal.SIGTERM)
    ended(crew, 75, 60)


def test_workers_that_are_stuck_do_not_hold_the_end(tmp_path: Path) -> None:
    """They are killed where they do not end by themselves."""
    crew = started(tmp_path, "single:1", "fork", 0.5, "40ep")
    until(crew, lambda: "step" in crew.said())
    (tmp_path / "block").touch()
    os.killpg(crew.pids[0], signal.SIGTERM)
    ended(crew, 75, 30)
