"""Room: how far an attempt has come, in 16 bytes that survive SIGKILL: numbers are written once a second only. No torch."""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAME = "at"
"""Its file, in the attempt's folder."""
_SHAPE = struct.Struct("=dd")


class Mark:
    """Written after each step.

    Args:
        path: made anew.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _SHAPE.size)
        self._memory = mmap.mmap(descriptor, _SHAPE.size)
        os.close(descriptor)
        weakref.finalize(self, self._memory.close)

    def __call__(self, made: int) -> None:
        """So many steps of the run are made."""
        _SHAPE.pack_into(self._memory, 0, made, time.time())


def read(path: Path) -> tuple[int, float] | None:
    """Steps made, and when (seconds since 1970); None where nothing was marked."""
    try:
        made, when = _SHAPE.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return (int(made), when) if when > 0 else None
