"""Room: one run of the user's own program in a folder of its own, in a given layout; and the curve that it left."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_STOPPED, ConfigError, LaunchError
from worldsize.launch import local, program
from worldsize.launch.plan import Plan
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from worldsize.config import Duration

NUMBERS = ("loss", "lr", "grad_norm")
"""What is compared at each step, where the program has it."""


_AXIS = re.compile(r"(tp|pp|cp|replicas)([1-9]\d*)")
_SCHEDULE = "schedule="


@dataclass(frozen=True, slots=True)
class Layout:
    """How a trial lies over ranks: "single", "ddp:2", "tp2:2", "fsdp+tp2:4", "pp2+schedule=gpipe:2".

    Attributes:
        strategy: its name, "" for what is chosen where none is named.
        ranks: how many there are.
        axes: sizes of tp, pp, cp and replicas, and a pipeline's schedule.
    """

    strategy: str
    ranks: int
    axes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read what `str` writes. Raises ConfigError where the number of ranks is none, or a strategy is named twice."""
        words, _, ranks = text.strip().partition(":")
        axes, names = [], []
        for word in words.split("+"):
            axis = _AXIS.fullmatch(word)
            if axis is not None:
                axes.append((axis[1], axis[2]))
            elif word.startswith(_SCHEDULE):
                axes.append(("schedule", word.removeprefix(_SCHEDULE)))
            else:
                names.append(word)
        bad = len(names) > 1 or "" in names or not (ranks or "1").isdigit() or int(ranks or "1") < 1
        if bad or len(dict(axes)) < len(axes):
            raise ConfigError(
                f"layout {text!r}",
                do="write a strategy, sizes and a number of ranks: single, ddp:2, tp2:2, fsdp+tp2:4, pp2+schedule=gpipe:2",
            )
        return cls("".join(names), int(ranks or "1"), tuple(axes))

    def __str__(self) -> str:
        words = [f"{_SCHEDULE}{size}" if axis == "schedule" else f"{axis}{size}" for axis, size in self.axes]
        return f"{'+'.join(filter(None, [self.strategy, *words]))}:{self.ranks}"

    @property
    def folder(self) -> str:
        """A name for its trial."""
        return str(self).replace(":", "-").replace("=", "-")

    @property
    def options(self) -> dict[str, str]:
        """What a program is told, as a command line would."""
        said = {f"WORLDSIZE_{axis.upper()}": size for axis, size in self.axes}
        return said | ({"WORLDSIZE_STRATEGY": self.strategy} if self.strategy else {})


@dataclass(frozen=True, slots=True)
class Program:
    """What the user runs, and how each trial of it is set up.

    Attributes:
        script: a Python script that trains with `ws.Run` or `ws.Trainer`.
        args: its own arguments.
        folder: trials get folders in it.
        precision: replaces the program's own, where given.
        duration: replaces the program's own, where given.
    """

    script: str
    args: Sequence[str]
    folder: Path
    precision: str | None = None
    duration: Duration | None = None

    def run(
        self, name: str, layout: Layout, *, stop_after: int | None = None, more: Mapping[str, str] | None = None
    ) -> Curve:
        """Run the program once in the trial's folder; go on there if it was run before.

        Args:
            name: of the trial.
            layout: overrides the program's own.
            stop_after: stop as if a signal had come after this step.
            more: what else it is told.

        Raises:
            LaunchError: the program failed, or did not train with a Run.
        """
        where, logs = self.folder / name, self.folder / f"{name}.logs"
        options = {
            "WORLDSIZE_RUN_DIR": str(where),
            "WORLDSIZE_LEDGER": str(self.folder / f"{name}.ledger"),
            **layout.options,
            **(more or {}),
            "WORLDSIZE_PRECISION": self.precision or "",
            "WORLDSIZE_DURATION": str(self.duration or ""),
            "WORLDSIZE_STOP_AFTER": "" if stop_after is None else str(stop_after),
        }
        argv = program.argv(self.script, self.args)
        plan = Plan(argv=argv, nproc=layout.ranks, log_dir=logs, options=options)
        verdict = local.supervise(plan, Hidden(), say=False)
        if verdict.code not in (0, EXIT_STOPPED):
            raise LaunchError(f"{name} on {layout}: {verdict.line}", do=f"see {logs}")
        if not (where / "run.json").exists():
            raise LaunchError(
                f"{self.script} left no run in {where}", do="verify runs programs that train with ws.Run"
            )
        return self.curve(name)

    def copy(self, name: str, new: str) -> None:
        """What the trial has left so far, as a trial of another name."""
        shutil.copytree(self.folder / name, self.folder / new)
        ledger = self.folder / f"{name}.ledger"
        if ledger.exists():
            shutil.copytree(ledger, self.folder / f"{new}.ledger")

    def curve(self, name: str) -> Curve:
        """What the trial has left so far."""
        rows = read(self.folder / name / "metrics.jsonl")
        numbers = {number: latest(rows, number) for number in NUMBERS}
        return Curve(self.folder / name, numbers, deliveries(self.folder / f"{name}.ledger"))


class Hidden:
    """The console of a trial: everything is in its log files."""

    full = False

    def write(self, stream: int, data: bytes) -> None:
        """Nothing is shown."""

    def when_room(self, call: Any) -> None:
        """There is always room."""
        call()

    def flush(self, *_: Any) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What a trial left: numbers by name and step, and which samples each step was given."""

    run: Path
    numbers: dict[str, dict[int, float]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self.numbers["loss"])


def deliveries(folder: Path) -> dict[int, list[int]]:
    """Ids of the samples that all ranks together were given in each step, sorted; a repeated step counts once."""
    found: dict[int, dict[str, tuple[int, list[int]]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found.setdefault(row["step"], {})[path.name] = row["attempt"], row["ids"]
    return {step: _newest(list(ranks.values())) for step, ranks in sorted(found.items())}


def _newest(ranks: list[tuple[int, list[int]]]) -> list[int]:
    """Of ranks that were given a step in different attempts, those of the last one hold."""
    last = max(attempt for attempt, _ in ranks)
    return sorted(number for attempt, ids in ranks if attempt == last for number in ids)
