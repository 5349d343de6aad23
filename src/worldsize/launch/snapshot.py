"""Room: a copy of a program's code as it is now, uncommitted edits included, so that what waits runs what was handed over."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch import git

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEBIBYTE = 1 << 20
CAP = 100 * MEBIBYTE
_LARGEST = 5
_UNREADABLE = "\ufffd"
_NO_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "wandb", "mlruns"})
_NO_CODE_HOLDS = frozenset({"run.json", "pyvenv.cfg", "conda-meta"})
"""Names that only a run folder, a virtual environment or one of conda holds."""
_JOB = frozenset({"script.sh", "spec.json"})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was copied.

    Attributes:
        root: the folder that it is a copy of.
        files: how many; size: bytes.
    """

    root: Path
    files: int
    size: int


def root_of(script: Path) -> Path:
    """The folder that holds a program's code: that of the git repository around it, else its own."""
    folder = script if script.is_dir() else script.parent
    found = git.say(folder, "rev-parse", "--show-toplevel")
    return Path(found.rstrip("\n")) if found else folder


def take(
    root: Path,
    into: Path,
    *,
    suffixes: Sequence[str] = (),
    exclude: Sequence[str] = (),
    cap: int | None = CAP,
) -> Snapshot:
    """Copy the code below `root` to the new folder `into`.

    Code is what git tracks or would offer to add; without git, all that is not hidden. Never a run folder, a job's
    folder or a virtual environment.

    Args:
        root: the folder.
        into: where to; made here.
        suffixes: ends of names that are taken: ".py"; none: all.
        exclude: folders below root that are left out: "data", "out/big".
        cap: bytes that it may have; None: any number.

    Raises:
        ConfigError: root is no folder, there is no code in it, or too much: with the largest files.
    """
    root = root.absolute()
    if not root.is_dir():
        raise ConfigError("the folder of the code is not there", found=str(root), do="give another code_root")
    found = _chosen(root, into.absolute(), tuple(suffixes), tuple(exclude))
    # Neither pipes nor sockets are code.
    found = [path for path in found if (root / path).is_symlink() or (root / path).is_file()]
    sizes = {path: (root / path).lstat().st_size for path in found}
    _fits(root, sizes, cap)
    for path in found:
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target, follow_symlinks=False)
    return Snapshot(root, len(sizes), sum(sizes.values()))


def moved(path: Path, root: Path, into: Path) -> Path | None:
    """Where a path below `root` lies in its copy; None for one that is not below it."""
    try:
        return into / path.relative_to(root)
    except ValueError:
        return None


def imported_from(root: Path, venv: Path | None = None) -> list[Path]:
    """Folders below `root` that Python imports from: what is installed there as editable, PYTHONPATH.

    Args:
        root: the folder of the code.
        venv: the virtual environment whose Python it is; None: this interpreter.
    """
    places = _own_places() if venv is None else _places_of(venv)
    inside = [path for path in places if path.is_absolute() and path.is_relative_to(root)]
    # An environment that lies below the code is no code.
    return list(dict.fromkeys(path for path in inside if not path.is_relative_to(venv or sys.prefix)))


def _own_places() -> list[Path]:
    finders = (getattr(sys.modules.get(_module(finder)), "MAPPING", None) for finder in sys.meta_path)
    editable = (path for mapping in finders if isinstance(mapping, dict) for path in mapping.values())
    return [*(Path(path).parent for path in editable), *map(Path, sys.path[1:])]


def _places_of(venv: Path) -> list[Path]:
    files = sorted(venv.glob("lib/python3*/site-packages/*.pth"))
    lines = (line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return [Path(line) for line in lines if line.startswith("/")]


def _module(finder: object) -> str:
    return str(getattr(finder, "__module__", ""))


def _chosen(root: Path, into: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...]) -> list[str]:
    listed = git.say(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    every = list(_walk(root)) if listed is None else sorted(_tracked(root, listed))
    left = [Path(folder.strip("/")) for folder in exclude]
    own = moved(into, root, Path())
    left += [*_not_code(every), *([own] if own else [])]
    return [
        path
        for path in every
        if (not suffixes or path.endswith(suffixes)) and not any(Path(path).is_relative_to(folder) for folder in left)
    ]


def _tracked(root: Path, listed: str) -> Iterator[str]:
    """What git lists and is there; of a repository inside it, what that one's git lists."""
    for path in dict.fromkeys(filter(None, listed.split("\0"))):
        place = root / path
        if _UNREADABLE in path:
            raise ConfigError("a file's name is no UTF-8", found=repr(str(place)), do="rename or ignore it")
        if place.is_dir() and not place.is_symlink():
            inner = git.say(place, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
            yield from (f"{path.rstrip('/')}/{name}" for name in _tracked(place, inner or ""))
        elif os.path.lexists(place):
            yield path


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        place = Path(folder).relative_to(root)
        if place != Path() and _NO_CODE_HOLDS & {*files, *folders}:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NO_CODE)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (str(place / name) for name in sorted([*files, *links]) if not name.startswith("."))


def _not_code(paths: list[str]) -> list[Path]:
    """Folders among them that are runs, jobs or environments."""
    held: dict[Path, set[str]] = {}
    for path in map(Path, paths):
        if path.name in _NO_CODE_HOLDS | _JOB:
            held.setdefault(path.parent, set()).add(path.name)
    return [
        folder for folder, names in held.items() if folder != Path() and (names & _NO_CODE_HOLDS or names >= _JOB)
    ]


def _fits(root: Path, sizes: dict[str, int], cap: int | None) -> None:
    if not sizes:
        raise ConfigError(f"there is no code in {root}", do="give another code_root, or other suffixes")
    total = sum(sizes.values())
    if cap is not None and total > cap:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
        raise ConfigError(
            f"the code in {root} has {_mib(total)}, more than {_mib(cap)}",
            found="the largest: " + ", ".join(f"{path} ({_mib(size)})" for path, size in largest),
            do="ignore or exclude what is no code (exclude_code_folders), or raise code_limit",
        )


def _mib(size: int) -> str:
    return f"{size / MEBIBYTE:.1f} MiB"
