"""Room: how far an attempt has come, in 16 bytes that survive SIGKILL: numbers are written once a second only. No torch."""

from __future__ import annotations

import os
import struct
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "at"
"""Its file, in the attempt's folder."""
_SHAPE = struct.Struct("=dd")


class Mark:
    """Written after each step.

    Args:
        path: made anew.
        say: takes a line for a person, the first time that it cannot be written: no training ends for it.
    """

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self._name, self._say = path.name, say
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            self._tell(error)
        else:
            weakref.finalize(self, os.close, self._file)

    def __call__(self, made: int) -> None:
        """So many steps of the run are made."""
        if self._file is None:
            return
        try:
            # Not through a map, which takes half a microsecond less: on a full disk SIGBUS would end the process.
            os.pwrite(self._file, _SHAPE.pack(made, time.time()), 0)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        say, self._say = self._say, None
        if say is not None:
            say(f"worldsize: steps cannot be marked in {self._name!r}: {error.strerror}; training goes on")


def read(path: Path) -> tuple[int, float] | None:
    """Steps made, and when (seconds since 1970); None where nothing was marked."""
    try:
        made, when = _SHAPE.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return (int(made), when) if when > 0 else None
