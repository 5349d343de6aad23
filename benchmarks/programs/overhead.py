"""One training whose steps are measured in turn with and without what shows how it goes: clocks, times.jsonl, the mark."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import worldsize as ws
from worldsize.runtime.clock import Clock

_WARM = 200


class Off(Clock):
    """A clock that does not look at the time."""

    def enter(self, phase: int) -> int:
        """Only what other rooms look at."""
        before, self.phase = self.phase, phase
        return before

    def backward(self, losses: torch.Tensor) -> None:
        """Nothing."""

    def step(self) -> None:
        """Nothing."""


@dataclass
class NoTimes:
    """Times that nobody takes."""

    def take(self, step: int, samples: float) -> None:
        """Nothing."""

    def flush(self, *, last: bool = False) -> None:
        """Nothing."""


def main() -> None:
    """Train, switching every `block` steps in the order on, off, off, on; print each step's microseconds of work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=800)
    parser.add_argument("--dir", required=True)
    asked = parser.parse_args()
    steps = _WARM + asked.block * asked.blocks
    run = ws.Run(
        f"{asked.dir}/run",
        global_batch=8,
        micro_batch=4,
        duration=f"{steps}st",
        saving=ws.Saving(every=None),
        device="cpu",
    )
    model = run.model(lambda: nn.Linear(16, 4))
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.01), model)
    seen: dict[str, list[float]] = {"on": [], "off": []}
    flushes: list[float] = []
    began, way, clocks = 0.0, "", {}
    for step in run.steps(torch.utils.data.TensorDataset(torch.arange(8192.0).view(512, 16) / 8192)):
        now, place = time.thread_time(), step.index - _WARM
        if way:
            seen[way].append((now - began) * 1e6)
        if place >= 0 and place % asked.block == 0:
            loop: Any = run._loop  # noqa: SLF001 - switched from outside
            clocks = clocks or {"on": (loop.engine.clock, timed(loop.times, flushes)), "off": (Off(), NoTimes())}
            way = ("on", "off", "off", "on")[place // asked.block % 4]
            loop.engine.clock, loop.times = clocks[way]
        began = time.thread_time()
        for (x,) in step.micro_batches:
            step.backward(model(x).square().mean(1))
        step.update()
    if run.comm.rank == 0:
        tenths = {way: statistics.quantiles(took, n=10) for way, took in seen.items()}
        found = {**tenths, "flush": statistics.median(flushes), "ranks": run.comm.size}
        print(json.dumps(found), flush=True)


def timed(times: Any, flushes: list[float]) -> Any:
    """With this thread's seconds of work for each flush noted."""
    flush = times.flush

    def told(*, last: bool = False) -> None:
        began = time.thread_time()
        flush(last=last)
        flushes.append(time.thread_time() - began)

    times.flush = told
    return times


if __name__ == "__main__":
    main()
