"""Room: where each rank's time goes, gathered over ranks about once a second and written to times.jsonl, one line each time.

The ranks' numbers travel while training goes on: what was asked for at one flush is written at the next.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from worldsize.runtime.clock import PHASES
from worldsize.track.jsonl import Appender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from worldsize.runtime.clock import Clock, Spent
    from worldsize.runtime.comm import Comm, Pending

FILE = "times.jsonl"
_OFTEN, _SELDOM = 60, 10
"""So many flushes are all written; of later ones every tenth: a long run must not fill its folder."""
_SHOWN = 64
"""Up to so many ranks stand in a line one by one."""
_SPREAD = 5
_WIDTH = len(PHASES) + 2 * _SPREAD + 4


class Times:
    """Gathers what the ranks' clocks say.

    Args:
        comm: the agreement between all ranks.
        clock: this rank's.
        device: this rank's.
        write: takes a line; mark: takes how many steps are made. Both do nothing on all ranks but one.
    """

    def __init__(
        self,
        comm: Comm,
        clock: Clock,
        device: torch.device,
        write: Callable[[dict[str, Any]], None],
        mark: Callable[[int], None],
    ) -> None:
        self._comm, self._clock, self._device, self._write, self._mark = comm, clock, device, write, mark
        self._asked: tuple[Pending, dict[str, Any] | None] | None = None
        self._began, self._worked = time.perf_counter(), time.process_time()
        self._samples, self._step, self._flushes = 0, -1, 0
        self._steps = [0.0] * (2 * _SPREAD)

    def take(self, step: int, samples: float) -> None:
        """A step is over."""
        self._clock.step()
        self._mark(step + 1)
        self._step, self._samples = step, self._samples + int(samples)

    def flush(self, *, last: bool = False) -> None:
        """Write what was asked for the last time, and ask anew; at the end wait for the answer. Collective."""
        self._flushes += 1
        if self._flushes > _OFTEN and self._flushes % _SELDOM and not last:
            return
        self._answer()
        self._ask(self._clock.read())
        if last:
            self._answer()

    def _ask(self, spent: Spent) -> None:
        now, worked = time.perf_counter(), time.process_time()
        facts = {
            "time": round(time.time(), 3),
            "step": self._step,
            "seconds": now - self._began,
            "samples": self._samples,
        }
        used = _used(self._device, (worked - self._worked) / max(now - self._began, 1e-9))
        if spent.steps:  # which steps its device has finished, a rank cannot know of the others
            self._steps = [*_spread(spent.steps), *_spread(spent.own)]
        own = [*spent.phases, *self._steps, spent.count, *used]
        # A sum in which all others have zeros: one collective, of a size that every rank knows.
        numbers = [0.0] * (_WIDTH * self._comm.size)
        numbers[_WIDTH * self._comm.rank : _WIDTH * (self._comm.rank + 1)] = own
        self._asked = self._comm.start_sum(numbers), facts if spent.steps else None
        if spent.steps:  # else the interval goes on
            self._began, self._worked, self._samples = now, worked, 0

    def _answer(self) -> None:
        if self._asked is None:
            return
        (pending, facts), self._asked = self._asked, None
        numbers = pending.wait()
        if facts is not None:
            self._write(line(facts, [numbers[at : at + _WIDTH] for at in range(0, len(numbers), _WIDTH)]))


class Lines:
    """Appends to a run folder's times.jsonl.

    Args:
        folder: the run folder.
        attempt: stands in every line.
        say: takes a line for a person, where the file cannot be written.
    """

    def __init__(self, folder: Path, attempt: int, say: Callable[[str], None] | None = None) -> None:
        self._file, self._attempt = Appender(folder / FILE, say), attempt

    def __call__(self, row: dict[str, Any]) -> None:
        """One line, with the attempt."""
        self._file.add({**row, "attempt": self._attempt})
        self._file.close()


def line(facts: dict[str, Any], ranks: list[list[float]]) -> dict[str, Any]:
    """The line for one interval.

    Args:
        facts: step, seconds, samples.
        ranks: the numbers of each.
    """
    phases, steps, own, (count, memory, peak, use) = _columns(ranks)
    means = own[-1]
    row: dict[str, Any] = {
        **facts,
        "seconds": _short(facts["seconds"]),
        "steps": int(max(count)),
        "ranks": len(ranks),
        "slowest": means.index(max(means)),
        "phases": {name: _over(values) for name, values in zip(PHASES, phases, strict=True)},
        "own": _over(means),
        "memory": _over(memory), "peak": _over(peak), "use": _over(use),
    }  # fmt: skip
    if len(ranks) <= _SHOWN:
        each = {"step": steps, "own": own}
        spreads = {
            name: [[_short(value) for value in rank] for rank in zip(*found, strict=True)]
            for name, found in each.items()
        }
        flat = {"memory": memory, "peak": peak, "use": use}
        row["by_rank"] = spreads | {name: [_short(value) for value in found] for name, found in flat.items()}
    return row


def _columns(ranks: list[list[float]]) -> tuple[list[list[float]], ...]:
    columns = [list(column) for column in zip(*ranks, strict=True)]
    first, second = len(PHASES), len(PHASES) + _SPREAD
    return columns[:first], columns[first:second], columns[second : second + _SPREAD], columns[second + _SPREAD :]


def _over(values: Sequence[float]) -> list[float]:
    """Least, median and most over ranks, and whose the most is."""
    most = max(values)
    return [_short(min(values)), _short(statistics.median(values)), _short(most), list(values).index(most)]


def _spread(values: list[float]) -> list[float]:
    """Least, median, that which nine of ten do not exceed, most, and mean."""
    ordered, count = sorted(values), len(values)
    return [ordered[0], ordered[count // 2], ordered[count * 9 // 10], ordered[-1], sum(ordered) / count]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _used(device: torch.device, cores: float) -> tuple[float, float, float]:
    """Bytes in use, at most so far, and how much of the device was at work: of a GPU its share, of a host its cores."""
    if device.type != "cuda":
        # Linux counts in KiB, macOS in bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        now = _resident(peak)
        return now, max(now, float(peak)), cores
    stats = torch.cuda.memory_stats(device)
    held, most = stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0)
    try:
        use = torch.cuda.utilization(device) / 100
    except Exception:  # noqa: BLE001 - no pynvml, no driver's library, a device or a container that does not tell
        use = -1.0
    return float(held), float(most), use


def _resident(otherwise: float) -> float:
    import psutil

    try:
        return float(psutil.Process().memory_info().rss)
    except psutil.Error:
        return otherwise
