"""Room: what a host sees of a folder that all should share: new files, renames over open ones, exclusive creation."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from worldsize.tools.doctor.disk import nearest

PREFIX = ".worldsize-doctor-"
_POLL_S = 0.02
_held: dict[str, int] = {}


def begin(path: str) -> str:
    """A new folder in this one, or in the nearest around it; its path."""
    return tempfile.mkdtemp(prefix=PREFIX, dir=nearest(Path(path)))


def end(folder: str) -> None:
    """Remove what `begin` made."""
    assert Path(folder).name.startswith(PREFIX), folder
    shutil.rmtree(folder, ignore_errors=True)


def put(folder: str, name: str, text: str) -> None:
    """Leave a file there whole: written beside, then renamed, over an older one too."""
    part = Path(folder, f".{name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(Path(folder, name))


def look(folder: str, names: list[str], text: str, limit: float) -> dict[str, float | None]:
    """Name -> seconds until the file was seen with this text; None: not within `limit`."""
    began = time.monotonic()
    seen: dict[str, float | None] = dict.fromkeys(names)
    while True:
        for name in names:
            if seen[name] is None and _read(Path(folder, name)) == text:
                seen[name] = time.monotonic() - began
        if None not in seen.values() or time.monotonic() - began >= limit:
            return seen
        time.sleep(_POLL_S)


def hold(folder: str, name: str) -> None:
    """Keep a file open."""
    _held[name] = os.open(Path(folder, name), os.O_RDONLY)


def held(name: str) -> str:
    """What the open file holds, and close it; what went wrong with that begins with "error"."""
    descriptor = _held.pop(name)
    try:
        return os.pread(descriptor, 1024, 0).decode()
    except OSError as error:
        return f"error: {error}"
    finally:
        os.close(descriptor)


def claim(folder: str, names: list[str]) -> list[str]:
    """Which of these files this host could create where nobody else could."""
    won = []
    for name in names:
        try:
            os.close(os.open(Path(folder, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            continue
        won.append(name)
    return won


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
