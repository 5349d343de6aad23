"""Room: the numbers of each step on their way out.

About once a second what has arrived from the device is written, without waiting for the rest: see `arriving`. At a commit, and
before what the program itself logs, all of it is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from worldsize.train.arriving import Arrivals

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.runtime.comm import Comm
    from worldsize.track.base import Tracker
    from worldsize.train.arriving import Arriving
    from worldsize.train.parts import Trained
    from worldsize.train.progress import Progress
    from worldsize.train.step import Step

_EVERY = 1.0
Sums = list[dict[str, tuple[float, float]]]
"""For each rank (sum, n) by name."""


class Recorder(Protocol):
    """Takes each step's numbers."""

    def due(self) -> bool:
        """Whether a second has passed since it last was. What needs no other rank is written then."""
        ...

    def take(self, step: Step, samples: int, optimizers: list[Trained]) -> None:
        """Remember a step's numbers, without reading them."""
        ...

    @property
    def holds(self) -> bool:
        """Whether there are numbers of the program's own to be summed over ranks."""
        ...

    def write(self) -> None:
        """Write all that was taken, so that lines are in the order of steps."""
        ...

    def flush(self, comm: Comm | None) -> None:
        """Write what has arrived; with `comm` all of it, and the program's own numbers of all ranks, which is collective."""
        ...


class SumRecorder:
    """The recorder of every process but one: keeps only what must be summed over ranks."""

    def due(self) -> bool:
        """Never by itself."""
        return False

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float | Tensor, float]] = {}

    def take(self, step: Step, samples: int, optimizers: list[Trained]) -> None:
        """Add what `step.log` gathered."""
        del samples, optimizers
        for name, (total, count) in step.sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count

    @property
    def holds(self) -> bool:
        """Whether `step.log` gave something since the last time."""
        return bool(self._sums)

    def write(self) -> None:
        """Nothing: what must be summed waits."""

    def flush(self, comm: Comm | None) -> None:
        """Give this rank's sums to the others."""
        self._gather(comm)

    def _gather(self, comm: Comm | None) -> dict[str, float]:
        if comm is None:
            return {}
        mine = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        self._sums.clear()
        return _means(comm.gather(mine))


class StepRecorder(SumRecorder):
    """Writes steps to a tracker and to the progress display."""

    def __init__(self, tracker: Tracker, progress: Progress) -> None:
        super().__init__()
        self._tracker, self._progress = tracker, progress
        self._taken: deque[_Taken] = deque()
        self._arrivals = Arrivals()
        self._next, self._index = 0.0, -1

    def due(self) -> bool:
        """See `Recorder`."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _EVERY
        if not self.holds:  # else the last line waits for the sums
            self._write({}, whole=False)
        return True

    def take(self, step: Step, samples: int, optimizers: list[Trained]) -> None:
        """Send a step's numbers to the host, without waiting for them."""
        super().take(step, samples, optimizers)
        values: dict[str, float | Tensor] = {"epoch": step.epoch, "samples": samples, "loss": step.loss}
        for entry in optimizers:
            name = "lr" if len(optimizers) == 1 else f"lr/{entry.named.name}"
            values[name] = entry.optimizer.param_groups[0]["lr"]
        if step.grad_norm is not None:
            values["grad_norm"] = step.grad_norm
        late = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        there = {name: math.nan if name in late else _plain(value) for name, value in values.items()}
        self._index = step.index
        self._taken.append(_Taken(step.index, there, list(late), self._arrivals.send(list(late.values()))))

    def flush(self, comm: Comm | None) -> None:
        """See `Recorder`."""
        self._write(self._gather(comm), whole=comm is not None)

    def write(self) -> None:
        """Write all that was taken, without the sums."""
        self._write({}, whole=True)

    def _write(self, logged: dict[str, float], *, whole: bool) -> None:
        while self._taken and (whole or self._taken[0].arriving.there):
            taken = self._taken.popleft()
            row = taken.there | dict(zip(taken.late, taken.arriving.read(), strict=True))
            if not self._taken:
                row |= logged
                logged = {}
            self._tracker.log(taken.index, row)
            self._progress.show(taken.index, row)
        if logged:  # the line of this step is written already
            self._tracker.log(self._index, logged)


@dataclass(frozen=True, slots=True)
class _Taken:
    """One step.

    Attributes:
        index: which.
        there: the host's numbers, by name, and a place for each of the device's.
        late: names of the device's.
        arriving: these.
    """

    index: int
    there: dict[str, float]
    late: list[str]
    arriving: Arriving


def _plain(value: float | Tensor) -> float:
    return value if isinstance(value, int) else float(value)


def _means(sums: Sums) -> dict[str, float]:
    names = sorted({name for rank in sums for name in rank})
    pairs = {name: [rank[name] for rank in sums if name in rank] for name in names}
    counts = {name: sum(count for _, count in pairs[name]) for name in names}
    return {name: sum(total for total, _ in pairs[name]) / counts[name] for name in names if counts[name]}
