"""Room: how much room and speed a folder has: a bounded write, fsynced and removed again."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_BLOCK = os.urandom(1 << 20)
_MIB = 1 << 20
_SYNC = 8
"""MiB between two looks at the clock that are worth something: before fsync they are only in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a folder gave. Sizes are in MiB, `speed` in MiB/s; `error` is why nothing could be written."""

    path: str
    free: int = 0
    total: int = 0
    files_free: int | None = None
    written: float = 0.0
    speed: float = 0.0
    error: str = ""
    full: bool = False


def nearest(path: Path) -> Path:
    """The folder, or the first around it that is there."""
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def write(path: Path, mebibytes: int, limit: float) -> Written:
    """Write so much, or for so many seconds; the speed counts until it is on the disk."""
    folder = nearest(path)
    facts = os.statvfs(folder)
    room = {
        "path": str(folder),
        "free": facts.f_bavail * facts.f_frsize // _MIB,
        "total": facts.f_blocks * facts.f_frsize // _MIB,
        "files_free": facts.f_favail if facts.f_files else None,
    }
    try:
        done, took = _timed(folder, mebibytes, limit)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Written(**room, error=str(error), full=full)  # type: ignore[arg-type]
    return Written(**room, written=done, speed=done / max(took, 1e-6))  # type: ignore[arg-type]


def _timed(folder: Path, mebibytes: int, limit: float) -> tuple[float, float]:
    with tempfile.NamedTemporaryFile(prefix=".worldsize-doctor-", dir=folder, buffering=0) as file:
        began, done = time.monotonic(), 0
        while done < mebibytes and time.monotonic() - began < limit:
            if file.write(_BLOCK) != len(_BLOCK):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            done += 1
            if done % _SYNC == 0:
                os.fsync(file.fileno())
        os.fsync(file.fileno())
        return float(done), time.monotonic() - began
