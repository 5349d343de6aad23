"""Room: how the tasks of a step learn where the first of them listens: it keeps a port and writes that down.

Written into the job's folder, which all nodes share: a port that is guessed (from a job id, or fixed) may be taken.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError

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


def publish(path: Path, spot: Spot) -> None:
    """Write it down for the others, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    part.write_text(json.dumps(asdict(spot)), encoding="utf-8")
    part.rename(path)


def wait(path: Path, limit: float, *, who: str) -> Spot:
    """Read what the first task wrote.

    Args:
        path: the file that `publish` writes.
        limit: seconds to wait.
        who: the node that was expected to write it.

    Raises:
        LaunchError: nothing came in time.
    """
    began = refreshed = time.monotonic()
    while True:
        try:
            return Spot(**json.loads(path.read_text(encoding="utf-8")))
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
