"""Room: temporary folders that do not outlive their use, however their process ends.

Each holds a file that its process keeps locked. The kernel lets go of the lock with the process, SIGKILL included, whatever
its number was and whichever container it ran in; so a folder of this host whose file nobody holds is swept by whoever makes
the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

PREFIX = "worldsize-"
HELD = ".held"
"""The file that is locked; it says on which host."""
_YOUNG_S = 60.0
"""A folder of this age may be about to get its lock."""


class Scratch:
    """A new folder that is this process's alone.

    Args:
        kind: a word of its name.

    Raises:
        OSError: there is no room for temporary files.
    """

    def __init__(self, kind: str) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self._lock: int | None = os.open(self.path / HELD, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # where there are no locks, nobody finds it free either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, host())

    def keep(self) -> None:
        """Leave it to a person: from now on nobody sweeps it. Safe to call twice."""
        if self._lock is not None:
            (self.path / HELD).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove it with all that is in it. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def sweep() -> None:
    """Remove what dead processes of this user left."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                _sweep(Path(entry.path), entry.stat(follow_symlinks=False))


def _sweep(folder: Path, facts: os.stat_result) -> None:
    if facts.st_uid != os.geteuid() or time.time() - facts.st_mtime < _YOUNG_S:
        return
    with suppress(OSError):
        lock = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, 1024) == host():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def host() -> bytes:
    """This host, as `HELD` says it."""
    return os.fsencode(socket.gethostname())
