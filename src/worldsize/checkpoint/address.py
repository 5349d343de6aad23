"""Room: what people call a checkpoint: its folder, its run's folder (the newest), or RUN@STEP. No torch."""

from __future__ import annotations

from pathlib import Path

from worldsize.checkpoint.manifest import FOLDER, MANIFEST, committed, step_of
from worldsize.errors import CheckpointError

_SHOWN = 8
_FORMS = "name a checkpoint folder, a run folder (its newest checkpoint is meant), or RUN@STEP"


def find(where: Path | str) -> Path:
    """The one checkpoint that is meant; of a run folder the newest committed one.

    Raises:
        CheckpointError: there is none, with what is there instead.
    """
    return every(where)[-1]


def every(where: Path | str) -> list[Path]:
    """All checkpoints that are meant: those of a run folder, oldest first, or the one that is named.

    Raises:
        CheckpointError: there is none, with what is there instead.
    """
    path = Path(where)
    if (path / MANIFEST).is_file():
        return [path]
    if found := committed(path):
        return found
    if path.name == FOLDER and (found := committed(path.resolve().parent)):
        return found
    run, at, step = str(where).rpartition("@")
    if at and not path.exists():
        return [_at(Path(run), step)]
    raise CheckpointError(f"{path} is no checkpoint and no run folder with one", found=_there(path), do=_FORMS)


def _at(run: Path, step: str) -> Path:
    if not run.is_dir():
        raise CheckpointError(f"{run}@{step}: there is no run folder {run}", found=_there(run), do=_FORMS)
    there = committed(run)
    for path in there:
        if step.isdecimal() and step_of(path) == int(step):
            return path
    steps = ", ".join(str(step_of(path)) for path in there[-_SHOWN:])
    more = f"the last {_SHOWN} of {len(there)} are " if len(there) > _SHOWN else ""
    found = f"steps {more}{steps}" if there else _there(run)
    raise CheckpointError(
        f"{run} has no committed checkpoint of step {step}", found=found, do="worldsize checkpoint ls"
    )


def _there(path: Path) -> str:
    if path.is_file():
        return "a file"
    if not path.is_dir():
        return "no such folder"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "an empty folder"
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
