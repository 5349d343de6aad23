"""Room: the trials of a scaling measurement: the program on so many ranks here, or on so many nodes of a queue."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from worldsize.errors import LaunchError
from worldsize.tools.scale import points
from worldsize.tools.scale.energy import Energy
from worldsize.tools.scale.points import Point
from worldsize.tools.trial import Layout, Program
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec
    from worldsize.tools.scale.points import Interval

SPEEDS = ("tokens_per_second_per_device", "mfu")
"""What the language model recipe logs."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a trial is."""

    nodes: int
    ranks: int


class Place(Protocol):
    """Where trials run."""

    def run(self, name: str, size: Size, options: Mapping[str, str]) -> tuple[Path, float | None]:
        """Run one; its run folder, and the joules of a step where they are known.

        Raises:
            LaunchError: the program failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """This machine."""

    program: Program

    def run(self, name: str, size: Size, options: Mapping[str, str]) -> tuple[Path, float | None]:
        """See `Place`."""
        with Energy() as energy:
            curve = self.program.run(name, Layout(options.get("WORLDSIZE_STRATEGY", ""), size.ranks), more=options)
        found = points.intervals(curve.run)
        begin = found[0].ended - found[0].seconds * found[0].steps
        joules = energy.between(begin, found[-1].ended)
        return curve.run, None if joules is None else joules / sum(each.steps for each in found)


@dataclass(frozen=True, slots=True)
class Queue:
    """A Slurm cluster: each size is a job, one after another.

    Attributes:
        spec: the job, but for its nodes and what trials are told.
        site: the profile.
        folder: trials get folders in it; all nodes see it.
        say: tells a person what is waited for.
    """

    spec: JobSpec
    site: Profile
    folder: Path
    say: Callable[[str], None]

    def run(self, name: str, size: Size, options: Mapping[str, str]) -> tuple[Path, float | None]:
        """See `Place`. Slurm's own accounting of energy is not asked: few sites have it."""
        from worldsize.launch import env
        from worldsize.launch.slurm import submit
        from worldsize.launch.slurm.client import Client

        run = self.folder / name
        told = {**self.spec.env, **options, "WORLDSIZE_RUN_DIR": str(run)}
        spec = self.spec.model_copy(update={"nodes": size.nodes, "env": told, "job_name": f"scale-{name}"})
        made = submit.draft(spec, self.site, self.folder / f"{name}.job")
        environ = env.read()
        ticket = submit.submit(made, Client(environ), submit.state_folder(environ))
        self.say(f"worldsize: {name}: job {ticket.job}")
        code = _ended(ticket.job)
        if code:
            raise LaunchError(f"{name}: job {ticket.job} ended with {code}", do=f"worldsize why {ticket.job}")
        return run, None


def _ended(job: str) -> int:
    """Wait; the exit code."""
    from worldsize.launch.slurm.known import Desk
    from worldsize.launch.slurm.watch import Watch

    desk = Desk.here(None)
    watch = Watch(desk, [job])
    while not watch.over:
        watch.look()
        if not watch.over:
            time.sleep(max(0.0, watch.due - time.monotonic()))
    return watch.code


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured.

    Attributes:
        sizes: of the trials.
        strategies: each of them on each size; ("",) for the program's own.
        repeats: how often, one round after another, so that what else happens on the machine meets all alike.
        weak: the global batch grows with the ranks; else it is the program's own on all.
        options: what each trial is told.
    """

    sizes: Sequence[Size]
    strategies: Sequence[str]
    repeats: int
    weak: bool
    options: Mapping[str, str]


def points_of(place: Place, asked: Asked) -> Iterator[Point]:
    """Run all trials.

    Yields:
        a point when all its trials are done.

    Raises:
        LaunchError: one failed.
    """
    found: dict[tuple[str, Size], list[list[Interval]]] = {}
    joules: dict[tuple[str, Size], list[float]] = {}
    batch: int | None = None
    for repeat in range(asked.repeats):
        for strategy in asked.strategies:
            for size in asked.sizes:
                options = {**asked.options, **({"WORLDSIZE_STRATEGY": strategy} if strategy else {})}
                if asked.weak and batch is not None:
                    options["WORLDSIZE_GLOBAL_BATCH"] = str(batch * size.ranks // asked.sizes[0].ranks)
                name = f"{strategy or 'own'}-{size.nodes}x{size.ranks // size.nodes}-{repeat}"
                run, used = place.run(name, size, options)
                if batch is None:
                    batch = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]["global_batch"]
                key = (strategy, size)
                found.setdefault(key, []).append(points.intervals(run))
                joules.setdefault(key, []).extend([] if used is None else [used])
                if repeat == asked.repeats - 1:
                    mean = sum(joules[key]) / len(joules[key]) if joules[key] else None
                    yield Point(strategy, size.nodes, size.ranks, points.joined(found[key]), points.epoch(run), mean)


def told(folder: Path) -> dict[str, float]:
    """What the programs of trials logged of their own speed, in the middle of its last half."""
    found: dict[str, list[float]] = {}
    for path in folder.glob("*/metrics.jsonl"):
        for row in read(path):
            for name in SPEEDS:
                if name in row:
                    found.setdefault(name, []).append(float(row[name]))
    return {name: statistics.median(values[len(values) // 2 :]) for name, values in found.items()}
