"""Room: how the tasks of a step learn where the first of them listens: it keeps a port and writes that down.

Written into the job's folder, which all nodes share: a port that is guessed (from a job id, or fixed) may be taken.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch.slurm import facts

if TYPE_CHECKING:
    from pathlib import Path

_POLL_S = 0.05
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the first task is reached."""

    address: str
    port: int
    host: str


def wait(path: Path, limit: float, *, who: str) -> Spot:
    """Read what the first task wrote.

    Args:
        path: the file in which the first task leaves its spot (`facts.put`).
        limit: seconds to wait.
        who: the node that was expected to write it.

    Raises:
        LaunchError: nothing came in time.
    """
    began = refreshed = time.monotonic()
    while True:
        try:
            return Spot(**facts.get(path))
        except FileNotFoundError:
            now = time.monotonic()
        if now - began > limit:
            raise LaunchError(
                f"{who} did not say within {limit:.0f} s where it listens",
                found=f"{socket.gethostname()} looked for {path}",
                do="see whether that node started (its log), and whether the job's folder is shared by all nodes",
            )
        if now - refreshed > _REFRESH_S:
            refreshed = now
            _refresh(path.parent)
        time.sleep(_POLL_S)


def _refresh(folder: Path) -> None:
    """Make a network file system ask its server again: it keeps for half a minute that a file was not there."""
    with suppress(OSError):
        os.utime(folder)
