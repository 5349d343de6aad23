"""Room: a run of a few milliseconds, for tests of what happens around its steps."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import worldsize as ws
from tests.integration.program import may_stop
from worldsize.runtime import env
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from worldsize.train.step import Step

LENGTH = 20
"""With 8 samples a step: steps of 8, 8 and 4, in micro-batches of 2."""


def data(length: int = LENGTH) -> torch.utils.data.TensorDataset:
    """Inputs of two numbers, and their sum with noise."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(length, 2, generator=drawn)
    return torch.utils.data.TensorDataset(x, x.sum(1) + 0.1 * torch.randn(length, generator=drawn))


class Line(nn.Module):
    """A linear function."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample."""
        found: Tensor = self.line(x).squeeze(1)
        return found


def make(folder: Path, **settings: Any) -> ws.Run:
    """A run of two epochs, in float64."""
    defaults: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "duration": "2ep", "precision": "fp64"}
    return ws.Run(folder, device="cpu", **{**defaults, **settings})


def parts(run: ws.Run) -> tuple[Line, torch.optim.Optimizer]:
    """The model and its optimizer."""
    model = run.model(Line)
    return model, run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9), model)


def errors(model: nn.Module, batch: Any) -> Tensor:
    """A squared error for each sample."""
    x, y = batch
    found: Tensor = (model(x) - y) ** 2
    return found


def send(step: Step, model: nn.Module) -> None:
    """All backward passes of a step."""
    for batch in step.micro_batches:
        step.backward(errors(model, batch))


def steps(run: ws.Run, model: nn.Module, source: Any = None) -> Iterator[Step]:
    """The run's steps, each updated already."""
    for step in run.steps(data() if source is None else source):
        send(step, model)
        step.update()
        yield step


def train(folder: Path, after: Callable[[ws.Run, Step], None] | None = None, **settings: Any) -> list[float]:
    """Train to the end, or to a stop. Returns the losses."""
    run = make(folder, **settings)
    model, _ = parts(run)
    losses = []
    with may_stop():
        for step in steps(run, model):
            losses.append(float(step.loss))
            if after is not None:
                after(run, step)
    run.close()
    return losses


def numbers(folder: Path, name: str) -> dict[int, float]:
    """What metrics.jsonl says about a name, by step; the last word holds."""
    return latest(read(folder / "metrics.jsonl"), name)


def stop() -> None:
    """As a scheduler asks for it."""
    os.kill(os.getpid(), signal.SIGTERM)


OFTEN = ws.Saving(every="1st")


def spoil(what: str, folder: Path) -> None:
    """From now on this process cannot write its error file, or what it prints."""
    if what == "error file":
        path = folder / f"{os.getpid()}.json"
        path.mkdir()
        env.export({"TORCHELASTIC_ERROR_FILE": str(path)})
        return
    nobody, writes = os.pipe()
    os.close(nobody)
    for stream in (1, 2):
        # Only until it leaves: whoever started it writes on the same files.
        atexit.register(os.dup2, os.dup(stream), stream)
        if stream == 1 or what == "both streams":
            os.dup2(writes, stream)
    os.close(writes)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays to the end
    sys.stdout.write("unsent\n")
