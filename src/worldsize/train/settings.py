"""Room: what decides a training, as one frozen value; which of it must not change between attempts.

What a person says at the command line (`worldsize run --strategy fsdp`) reaches a program through WORLDSIZE_* variables
and wins over what the program says: strategy, sizes, schedule, precision, device, trackers, run folder. The batch is the
training's own; only a measurement of weak scaling sets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from worldsize.config import Duration, Window
from worldsize.errors import ConfigError, LayoutError
from worldsize.runtime.grid import Sizes
from worldsize.track import spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ACCEPTABLE = (
    "global_batch", "micro_batch", "data", "seed", "precision", "duration", "own-generator", "unused", "optimizer",
)  # fmt: skip
"""What `accept=` may name."""


@dataclass(frozen=True, slots=True)
class Saving:
    """When checkpoints are written and which are kept.

    Attributes:
        every: a duration in steps, epochs or samples between checkpoints; None saves only at the end and on a stop.
        every_minutes: also when so much time has passed since the last one.
        keep_last: how many of the newest are kept.
        keep_every: keep each that falls on a multiple of this many steps for ever.
        keep_best: how many of the best (see `Run.best`) are kept.
        synchronous: stop training while a checkpoint is written.
        on_error: "continue" trains on with the older checkpoint after a failed save, "stop" ends the run.
    """

    every: str | Duration | None = "1ep"
    every_minutes: float | None = None
    keep_last: int = 2
    keep_every: int | None = None
    keep_best: int = 1
    synchronous: bool = False
    on_error: Literal["stop", "continue"] = "continue"

    def __post_init__(self) -> None:
        if self.on_error not in ("continue", "stop"):
            raise ConfigError("saving on_error", found=repr(self.on_error), do="choose 'continue' or 'stop'")
        if self.every is not None:
            Duration.parse(self.every)


@dataclass(frozen=True, slots=True)
class Stall:
    """When a training counts as stuck, and what is done about it. Lengths of time are in seconds.

    Attributes:
        policy: "wait" says who holds the others up, and goes on waiting; "requeue" also ends that rank, so that the launcher
            starts all of them again from the last commit; "off" does not look.
        times: so many usual steps without a step are too many.
        floor: but a stop shorter than this is none.
        first: for each of the first steps, with their data: they compile, allocate, open files.
        data: for a wait for data.
        evaluation: for each batch of an evaluation.
        save: for what a save takes of the training's time.
    """

    policy: Literal["wait", "requeue", "off"] = "wait"
    times: float = 10.0
    floor: float = 60.0
    first: float = 1800.0
    data: float = 300.0
    evaluation: float = 600.0
    save: float = 1800.0

    def __post_init__(self) -> None:
        if self.policy not in ("wait", "requeue", "off"):
            raise ConfigError("stall policy", found=repr(self.policy), do="choose 'wait', 'requeue' or 'off'")
        wrong = [name for name in _LENGTHS if not getattr(self, name) > 0]
        if wrong:
            raise ConfigError(f"stall {wrong[0]}", found=f"{getattr(self, wrong[0])}", do="give more than 0")

    def said(self, text: str) -> Stall:
        """With what a person says: a policy, and lengths by name, such as "requeue,floor=30,data=600"."""
        said: dict[str, Any] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            name, is_length, value = word.partition("=")
            try:
                said |= {name: float(value)} if is_length else {"policy": name}
            except ValueError:
                raise ConfigError(f"stall {name} is no number", found=repr(value), do="give seconds") from None
        unknown = said.keys() - {"policy", *_LENGTHS}
        if unknown:
            raise ConfigError(
                f"stall {min(unknown)} is not known", found=repr(text), do=f"choose from {', '.join(_LENGTHS)}"
            )
        return replace(self, **said)


_LENGTHS = ("times", "floor", "first", "data", "evaluation", "save")
_STEPS = ("global_batch", "stop_after", "digest_every")
_AS_IT_IS = ("strategy", "schedule", "precision", "device", "nonfinite")
NONFINITE = ("stop", "skip", "rewind", "ignore")


@dataclass(frozen=True, slots=True)
class Settings:
    """See `Run` for each."""

    dir: Path
    global_batch: int
    micro_batch: int | None
    duration: Duration
    seed: int = 0
    strategy: str | None = None
    sizes: Sizes = field(default_factory=Sizes)
    precision: str = "fp32"
    device: str | None = None
    accept: tuple[str, ...] = ()
    saving: Saving = field(default_factory=Saving)
    log_every: int | None = None
    stop_after: int | None = None
    ledger: Path | None = None
    schedule: str | None = None
    profile: Window | None = None
    stall: Stall = field(default_factory=Stall)
    nonfinite: str = "stop"
    digest_every: int | None = 1000
    track: tuple[spec.Track, ...] = ()

    def __post_init__(self) -> None:
        if self.global_batch < 1 or (self.micro_batch is not None and self.micro_batch < 1):
            raise ConfigError("batch sizes count samples", found=f"{self.global_batch}, {self.micro_batch}")
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ConfigError(
                "micro_batch is larger than global_batch",
                found=f"micro_batch={self.micro_batch}, global_batch={self.global_batch}",
                do="a micro-batch is what one rank computes at a time, the global batch what one step learns from",
            )
        if self.nonfinite not in NONFINITE:
            raise ConfigError("nonfinite", found=repr(self.nonfinite), do=f"choose from {', '.join(NONFINITE)}")
        if self.digest_every is not None and self.digest_every < 1:
            raise ConfigError(
                "digest_every counts steps", found=f"{self.digest_every}", do="give 1 or more, or None for never"
            )
        unknown = set(self.accept) - set(ACCEPTABLE)
        if unknown:
            raise ConfigError(f"accept={sorted(unknown)} is not known", do=f"choose from {', '.join(ACCEPTABLE)}")

    def overridden(self, environ: Mapping[str, str]) -> Settings:
        """With what the command line said."""
        said: dict[str, Any] = {}
        readers: dict[str, Callable[[str], Any]] = {
            **dict.fromkeys(_AS_IT_IS, str), **dict.fromkeys(_STEPS, lambda text: Duration.parse(f"{text}st").count),
            "stall": self.stall.said, "track": partial(spec.override, self.track), "duration": Duration.parse,
        }  # fmt: skip
        for name, reader in readers.items():
            if environ.get(f"WORLDSIZE_{name.upper()}"):
                said[name] = reader(environ[f"WORLDSIZE_{name.upper()}"])
        said["sizes"] = replace(self.sizes, **_sizes(environ))
        for name, variable in (("dir", "WORLDSIZE_RUN_DIR"), ("ledger", "WORLDSIZE_LEDGER")):
            if environ.get(variable):
                said[name] = Path(environ[variable])
        if environ.get("WORLDSIZE_PROFILE_STEPS"):  # WORLDSIZE_PROFILE is a site's
            said["profile"] = Window.parse(environ["WORLDSIZE_PROFILE_STEPS"])
        if environ.get("WORLDSIZE_SAVE_EVERY"):
            said["saving"] = replace(self.saving, every=environ["WORLDSIZE_SAVE_EVERY"])
        return replace(self, **said)

    def with_micro_batch(self, from_loader: int | None, per_step: int | None = None) -> Settings:
        """With the micro-batch settled, from whichever place said it.

        Raises:
            ConfigError: nothing says it, or two places differ.
        """
        derived = -(-self.global_batch // per_step) if per_step else None
        said = {name: value for name, value in (
            ("micro_batch=", self.micro_batch), ("micro_per_step=", derived), ("the DataLoader's batch_size", from_loader)
        ) if value is not None}  # fmt: skip
        if not said:
            raise ConfigError(
                "micro_batch is not set: it is how many samples one forward pass sees, and belongs to the training, not "
                "to the machine",
                do="give micro_batch= (what fits the smallest device), or a DataLoader with batch_size",
            )
        if len(set(said.values())) > 1:
            raise ConfigError("the micro-batch is said twice, differently", found=str(said))
        return replace(self, micro_batch=next(iter(said.values())))

    def frozen(self) -> dict[str, Any]:
        """What decides the samples and numbers of each step: written to run.json by the first attempt."""
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "seed": self.seed,
            "precision": self.precision,
            "duration": str(self.duration),
        }

    def refuse_changes(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        """Compare with what the first attempt wrote.

        Returns:
            a line for each change that `accept=` allows.

        Raises:
            LayoutError: something changed that would make it another training, with both numbers.
        """
        changed = {key: (before[key], now[key]) for key in now if key in before and before[key] != now[key]}
        changed.pop("duration", None)  # a longer or shorter training is the same one up to where they part
        refused = {key: pair for key, pair in changed.items() if key not in self.accept}
        if refused:
            raise LayoutError(
                "this run was begun with other settings: going on would be another training",
                found=", ".join(f"{key}: began with {old}, now {new}" for key, (old, new) in refused.items()),
                do=f"restore them, choose another run folder, or accept={tuple(sorted(refused))}",
            )
        return [f"{key} changed from {old} to {new}, accepted" for key, (old, new) in changed.items()]


def _sizes(environ: Mapping[str, str]) -> dict[str, int]:
    said = {name: environ.get(f"WORLDSIZE_{name.upper()}", "") for name in ("tp", "pp", "cp", "replicas")}
    for name, value in said.items():
        if value and not value.isdecimal():
            raise ConfigError(f"WORLDSIZE_{name.upper()} is no number", found=repr(value), do="give how many ranks")
    return {name: int(value) for name, value in said.items() if value}
