"""Room: which checkpoints stay, and how one goes without leaving half of it under a real name. No torch.

Hidden names beside the checkpoints: `.step-N.<token>.tmp` is being written, `.old` was replaced by one of the same
step, `.gone` is being deleted. Whatever a killed process leaves under them, `sweep` puts right.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from worldsize.checkpoint import disk
from worldsize.checkpoint.manifest import FOLDER, committed, folder_name, read, step_of
from worldsize.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

BEST = "best.json"
TMP, OLD, GONE = ".tmp", ".old", ".gone"


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay when a new one is committed. The newest always does."""

    last: int = 2
    """The newest so many."""
    every: int | None = None
    """Those whose step is a multiple of this, for ever."""
    best: int = 1
    """The latest so many of those marked as best."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0 or (self.every is not None and self.every < 1):
            raise ConfigError("checkpoints to keep are counted from 1", found=str(self), do="keep at least the last")

    def surplus(self, steps: Collection[int], best: Collection[int]) -> list[int]:
        """The steps that may go, oldest first."""
        ordered = sorted(steps)
        stay = set(ordered[-self.last :])
        stay |= {step for step in ordered if self.every and step % self.every == 0}
        stay |= set(sorted(set(best) & set(ordered))[-self.best :]) if self.best else set()
        return [step for step in ordered if step not in stay]


def hidden(run_dir: Path, step: int, token: str, ending: str) -> Path:
    """The hidden name of a checkpoint that is not, not yet or no more there."""
    return run_dir / FOLDER / f".{folder_name(step)}.{token}{ending}"


def place(tmp: Path, final: Path) -> None:
    """Give a whole and synced folder its real name. One of the same step that is there already is replaced.

    Killed between the two renames, the older one is under its hidden name, whole, and `sweep` puts it back.
    """
    old = None
    if final.exists():
        old = tmp.with_suffix(OLD)
        final.rename(old)
    try:
        tmp.rename(final)
    except OSError:
        if old is not None:
            old.rename(final)
        raise
    disk.sync(final.parent)
    if old is not None:
        remove(old)


def remove(folder: Path) -> None:
    """Delete a folder: first its name, then its files."""
    gone = folder if folder.name.endswith(GONE) else folder.with_name(f".{folder.name.lstrip('.')}.{_word()}{GONE}")
    if gone != folder:
        try:
            folder.rename(gone)
        except FileNotFoundError:
            return
    shutil.rmtree(gone)


def sweep(run_dir: Path) -> list[str]:
    """Put right what a killed writer left. Only for the owner of the run folder. Returns the names dealt with.

    Names change first and files go afterwards: a writer that was cut off and wakes up now finds nothing to rename.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    left = [path for path in folder.iterdir() if path.name.startswith(".step-")]
    for path in left:
        real = folder / path.name[1:].split(".")[0]
        with suppress(FileNotFoundError):
            if path.suffix == OLD and step_of(real) is not None and not real.exists():
                path.rename(real)
            elif path.suffix in (TMP, OLD):
                path.rename(path.with_name(f"{path.name}.{_word()}{GONE}"))
    if left:
        disk.sync(folder)
    for path in folder.iterdir():
        if path.name.startswith(".step-") and path.suffix == GONE:
            shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in left)


def mark_best(run_dir: Path, step: int) -> None:
    """Write down that the checkpoint of this step is the best so far."""
    disk.replace(run_dir / FOLDER / BEST, json.dumps(sorted({*_marked(run_dir), step})) + "\n")


def best_steps(run_dir: Path) -> set[int]:
    """The steps marked as best, in their manifest or afterwards."""
    found = _marked(run_dir)
    for path in committed(run_dir):
        with suppress(CheckpointError):
            manifest = read(path)
            if manifest.extra.get("best"):
                found.add(manifest.step)
    return found


def prune(run_dir: Path, keep: Keep, newest: int) -> list[int]:
    """Delete the checkpoints that need not stay beside the newest, which the caller has verified.

    What lies beyond the step of the newest was skipped when the training resumed: it neither counts nor goes.
    Returns the steps deleted.
    """
    every = {step: path for path in committed(run_dir) if (step := step_of(path)) is not None}
    paths = {step: path for step, path in every.items() if step <= newest}
    going = keep.surplus(paths, best_steps(run_dir))
    for step in going:
        remove(paths[step])
    return going


def _marked(run_dir: Path) -> set[int]:
    try:
        return {int(step) for step in json.loads((run_dir / FOLDER / BEST).read_text())}
    except (OSError, ValueError, TypeError):
        return set()


def _word() -> str:
    return uuid4().hex[:8]
