"""Room: what a trial's folder says of its speed, and what several say together. Reads files, starts nothing.

A point is made of intervals: what times.jsonl tells about once a second. The first of each trial are left out, as they hold
what happens once (compilation, warm caches, buckets); saves and evaluations are not part of a step.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.errors import LaunchError
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

WARM = 0.25
"""Which part of a trial's steps is left out at its beginning."""
_BESIDE = ("save", "evaluation")


@dataclass(frozen=True, slots=True)
class Interval:
    """About a second of training.

    Attributes:
        steps: how many were made.
        seconds: a step took.
        samples: a step had, over all ranks.
        waiting: share of a step in which the ranks waited for each other, on average.
        use: share of the devices that was at work; below 0 where nobody told.
        ended: when, in seconds since 1970.
    """

    steps: int
    seconds: float
    samples: float
    waiting: float
    use: float
    ended: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> Interval:
        """One line of times.jsonl."""
        middles = {name: over[1] for name, over in row["phases"].items() if name not in _BESIDE}
        whole, steps = sum(middles.values()), row["steps"]
        return cls(
            steps,
            whole / steps,
            row["samples"] / steps,
            middles["collectives"] / whole if whole else 0.0,
            row["use"][1],
            row["time"],
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One strategy on one number of ranks.

    Attributes:
        strategy: its name; "" for the program's own choice.
        nodes, ranks: how many.
        intervals: of all its trials.
        epoch: samples of one; None for data that has no end.
        joules: that a step needed; None where nobody told.
    """

    strategy: str
    nodes: int
    ranks: int
    intervals: tuple[Interval, ...] = field(repr=False)
    epoch: int | None = None
    joules: float | None = None

    @property
    def step(self) -> tuple[float, float, float]:
        """Seconds of a step: a quarter of the intervals was faster, the middle, three quarters were faster."""
        seconds = sorted(each.seconds for each in self.intervals)
        if len(seconds) == 1:
            return (seconds[0],) * 3
        first, middle, last = statistics.quantiles(seconds, n=4, method="inclusive")
        return first, middle, last

    @property
    def throughput(self) -> float:
        """Samples a second over all ranks, by the middle step."""
        return statistics.fmean(each.samples for each in self.intervals) / self.step[1]

    @property
    def epoch_seconds(self) -> float | None:
        """How long going through the data once takes, at this speed."""
        return None if self.epoch is None else self.epoch / self.throughput

    @property
    def waiting(self) -> float:
        """Share of a step in which ranks wait for each other."""
        return statistics.median(each.waiting for each in self.intervals)

    @property
    def use(self) -> float | None:
        """Share of the devices at work; None where nobody told."""
        told = [each.use for each in self.intervals if each.use >= 0]
        return statistics.median(told) if told else None


def intervals(run: Path) -> list[Interval]:
    """What a trial's folder tells, without its beginning.

    Raises:
        LaunchError: it tells nothing, or too little to leave the beginning out.
    """
    rows = [row for row in read(run / "times.jsonl") if row["steps"]]
    if not rows:
        raise LaunchError(f"{run} has no times.jsonl", do="scale programs that train with ws.Run or ws.Trainer")
    last = max(row["step"] for row in rows) + 1
    kept = [Interval.of(row) for row in rows if row["step"] + 1 - row["steps"] >= last * WARM]
    if not kept:
        raise LaunchError(
            f"{run}: too short to tell its speed",
            found=f"{last} steps in {len(rows)} s",
            do="give a longer --duration",
        )
    return kept


def epoch(run: Path) -> int | None:
    """Samples of an epoch; None where the data does not know."""
    said: int | None = json.loads((run / "run.json").read_text(encoding="utf-8"))["data"].get("length")
    return said


@dataclass(frozen=True, slots=True)
class Row:
    """A point beside the smallest of its strategy: how much faster, and which part of what the ranks could give at most."""

    point: Point
    speedup: float
    efficiency: float


def compared(points: Iterable[Point]) -> list[Row]:
    """Each point beside the one of its strategy with the fewest ranks, by samples a second."""
    found: list[Row] = []
    by_strategy: dict[str, list[Point]] = {}
    for point in points:
        by_strategy.setdefault(point.strategy, []).append(point)
    for group in by_strategy.values():
        ordered = sorted(group, key=lambda point: point.ranks)
        first = ordered[0]
        for point in ordered:
            speedup = point.throughput / first.throughput
            found.append(Row(point, speedup, speedup * first.ranks / point.ranks))
    return found


def joined(trials: Sequence[Sequence[Interval]]) -> tuple[Interval, ...]:
    """The intervals of repeated trials."""
    return tuple(each for trial in trials for each in trial)
