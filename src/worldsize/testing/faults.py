"""Room: what goes wrong on real machines, done on purpose: a world killed at any instant, a disk of a given size."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from worldsize.checkpoint.manifest import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.testing.nursery import Crew


def kill_after(crew: Crew, seconds: float) -> bool:
    """SIGKILL to all ranks after this time. False where they had all ended by then."""
    codes = crew.wait(seconds)
    crew.kill()
    return None in codes


def kill_in_save(crew: Crew, run_dir: Path, seconds: float, timeout: float = 60.0) -> bool:
    """SIGKILL to all ranks this long after a save has begun to write; half as long in the next one, where it was faster.

    False where they ended, or no save began in time.
    """
    end = time.monotonic() + timeout
    saves: set[str] = set()
    while not saves:
        before = half_written(run_dir)
        while not (saves := half_written(run_dir) - before):
            if None not in crew.codes() or time.monotonic() > end:
                crew.kill()
                return False
            time.sleep(0.0005)
        time.sleep(seconds)
        seconds, saves = seconds / 2, saves & half_written(run_dir)
    crew.kill()
    return True


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes at `folder`, which is made. Needs root on Linux; raises OSError without."""
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.fsencode(folder)
    if libc.mount(b"tmpfs", target, b"tmpfs", 0, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "tmpfs cannot be mounted here", str(folder))
    try:
        yield folder
    finally:
        libc.umount2(target, 2)  # MNT_DETACH: also while something holds a file open


def use_up(file: Path) -> None:
    """Make this file as large as its file system allows. There is room again when it is gone."""
    with suppress(OSError), file.open("wb", buffering=0) as more:
        while True:
            more.write(bytes(512))


def half_written(run_dir: Path) -> set[str]:
    """What a save under way, or one that was killed, has in the folder of the checkpoints."""
    try:
        return {path.name for path in (run_dir / FOLDER).iterdir() if path.suffix == ".tmp"}
    except FileNotFoundError:
        return set()
