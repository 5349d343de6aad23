"""Room: what a committed checkpoint says of itself, and whether its files are what it says. No torch.

A checkpoint is a folder `step-NNNNNNNN` with a manifest in it. It gets that name by a rename after everything in it
was written and synced, so a folder of that name is whole; `verify` finds what happened to it afterwards.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.checkpoint import disk
from worldsize.checkpoint.disk import FileFact
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

FORMAT = 1
"""The newest format that this version writes and reads."""

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
TRAIN = "train.json"

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a committed checkpoint says of itself."""

    step: int
    """Optimizer steps finished."""
    epoch: int
    """Epochs finished."""
    samples: int
    """Samples seen since the start of training."""
    layout: dict[str, Any]
    """The layout it was written by: for people and for refusing what cannot go on."""
    exact: bool | str
    """True, or where resuming is not bit-exact and why."""
    files: dict[str, FileFact]
    """Size and digest of every file beside the manifest."""
    created: str
    """When it was committed (ISO 8601, UTC)."""
    attempt: int
    """The attempt of the run that wrote it."""
    version: str
    """The version of worldsize that wrote it."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied tensors, each with the name under which it was saved."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts from the training."""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        return sum(fact.size for fact in self.files.values())

    def to_json(self) -> str:
        """The text of `manifest.json`, with a digest of itself."""
        body = asdict(self)
        return json.dumps(body | {"digest": _digest(body)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of a manifest of this or an older format. Raises CheckpointError."""
        try:
            body = json.loads(text)
            written = body["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(f"{type(error).__name__}: {error}") from error
        if isinstance(written, int) and written > FORMAT:
            raise CheckpointError(
                "this checkpoint was written by a newer worldsize",
                found=f"format {written}, this version reads up to format {FORMAT}",
                do="upgrade worldsize here, or go on with the version that wrote it",
            )
        reader = _READERS.get(written) if isinstance(written, int) else None
        if reader is None:
            raise _damaged(f"format {written!r}")
        try:
            return reader(body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _damaged(f"{type(error).__name__}: {error}") from error


def _read_1(body: dict[str, Any]) -> Manifest:
    digest = body.pop("digest")
    if digest != _digest(body):
        raise ValueError("its digest does not fit")
    files = {name: FileFact(int(fact["size"]), str(fact["digest"])) for name, fact in body.pop("files").items()}
    if any(name in ("", ".", "..") or "/" in name or "\0" in name for name in files):
        raise ValueError("it names files outside its folder")
    return Manifest(files=files, **body)


_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read_1}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(found: str) -> CheckpointError:
    return CheckpointError("the manifest of this checkpoint is damaged", found=found, do="use an older checkpoint")


def folder_name(step: int) -> str:
    """`step-00001200`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says, or None where it is no checkpoint's name."""
    found = _NAME.fullmatch(path.name)
    step = int(found[1]) if found else None
    return step if step is not None and folder_name(step) == path.name else None


def committed(run_dir: Path | str) -> list[Path]:
    """The committed checkpoints of a run, oldest step first."""
    folder = Path(run_dir) / FOLDER
    if not folder.is_dir():
        return []
    steps = {path: step_of(path) for path in folder.iterdir()}
    whole = [(step, path) for path, step in steps.items() if step is not None and (path / MANIFEST).is_file()]
    return [path for _, path in sorted(whole)]


def read(path: Path | str) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError where it is missing, damaged or foreign."""
    path = Path(path)
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_text())
    except OSError as error:
        found = f"{MANIFEST}: {error.strerror}"
        raise CheckpointError(f"{path} is not a committed checkpoint", found=found) from error
    except UnicodeDecodeError as error:
        raise _at(path / MANIFEST, _damaged(str(error))) from error
    except CheckpointError as error:
        raise _at(path / MANIFEST, error) from error
    named = step_of(path)
    if named is not None and named != manifest.step:
        raise CheckpointError(
            f"{path} is not the checkpoint that its name says",
            found=f"step {named} in the name, step {manifest.step} in the manifest",
            do="give the folder its own name back",
        )
    return manifest


def _at(path: Path, error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"{path}: {error.what}", found=error.found, do=error.do)


def verify(path: Path | str, files: Iterable[str] | None = None) -> list[str]:
    """What is wrong with a checkpoint, one line each; empty where its files are what the manifest says.

    Sizes are looked at first; digests only where all sizes fit.

    Args:
        path: the checkpoint folder.
        files: only these, so that ranks can share the work (see `share`); all where None.
    """
    path = Path(path)
    try:
        manifest = read(path)
    except CheckpointError as error:
        return [str(error)]
    chosen = {name: manifest.files[name] for name in (manifest.files if files is None else files)}
    wrong = [problem for name, fact in chosen.items() if (problem := _wrong_size(path / name, fact.size))]
    return wrong or [problem for name, fact in chosen.items() if (problem := _wrong_content(path / name, fact))]


def _wrong_size(file: Path, size: int) -> str | None:
    try:
        found = file.stat().st_size
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    return None if found == size else f"{file.name}: {found:,} bytes, the manifest says {size:,}"


def _wrong_content(file: Path, expected: FileFact) -> str | None:
    try:
        found = disk.fact(file)
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    return None if found == expected else f"{file.name}: the content is not what was written (its digest differs)"


def share(files: Mapping[str, FileFact], ranks: int) -> list[list[str]]:
    """Deal the files of a checkpoint over ranks, so that each reads about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += files[name].size
    return shares
