"""Room: what lies in a run's folder of checkpoints: those that are committed, and what is none, and why. No torch."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.checkpoint import manifest, owner, retain
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from worldsize.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints of a run.

    Attributes:
        run: the run folder.
        entries: the manifests of its committed checkpoints, oldest first.
        best: the steps that are marked as best.
        others: what else lies beside them: name -> why it is no checkpoint.
    """

    run: Path
    entries: list[Manifest]
    best: set[int]
    others: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        rows = [
            {key: value for key, value in asdict(entry).items() if key not in ("files", "aliases")}
            | {"bytes": entry.bytes, "best": entry.step in self.best, "newest": entry is self.entries[-1]}
            for entry in self.entries
        ]
        return {"run": str(self.run), "checkpoints": rows, "others": self.others}


def look(run: Path | str) -> Listing:
    """Read the manifests of a run. Raises CheckpointError where there is no run folder."""
    run = Path(run)
    if run.name == manifest.FOLDER and not (run / manifest.FOLDER).is_dir():
        run = run.resolve().parent
    folder = run / manifest.FOLDER
    if not folder.is_dir() and not (run / "run.json").is_file():
        found = "a checkpoint" if (run / manifest.MANIFEST).is_file() else "no checkpoints folder and no run.json"
        raise CheckpointError(
            f"{run} is no run folder", found=found if run.is_dir() else "no such folder", do="name a run folder"
        )
    entries: list[Manifest] = []
    others: dict[str, str] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else ():
        if not path.is_dir():
            continue
        why = _why_not(run, path)
        if why is None:
            try:
                entries.append(manifest.read(path))
            except CheckpointError as error:
                why = str(error)
        if why is not None:
            others[path.name] = why
    entries.sort(key=lambda entry: entry.step)
    return Listing(run, entries, retain.best_steps(run), others)


def _why_not(run: Path, path: Path) -> str | None:
    """Why a folder is no checkpoint by its name alone; None where it has the name of one."""
    if path.name.startswith(".step-"):
        return {
            retain.TMP: _unfinished(run),
            retain.OLD: "was replaced by one of the same step, or waits to be put back at the next start",
            retain.GONE: "is being deleted, or its deletion was cut off: the next start removes it",
        }.get(path.suffix, "its name is not one of ours")
    if manifest.step_of(path) is None:
        return "its name is not that of a checkpoint (step-00000000)"
    return (
        None
        if (path / manifest.MANIFEST).is_file()
        else f"it has no {manifest.MANIFEST}: it was not written by a commit"
    )


def _unfinished(run: Path) -> str:
    now = owner.current(run)
    who = "" if now is None else f"attempt {now.attempt} (pid {now.pid} on {now.host})"
    if now is not None and owner.alive(now):
        return f"is being written by {who}, or was left by one before it"
    if now is not None and not now.released and now.host != socket.gethostname():
        return f"is being written by {who} if that still runs; else the next start removes it"
    return "was being written when its attempt ended: the next start removes it"
