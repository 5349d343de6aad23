"""Room: torch's process groups are given back, and nothing of theirs is left to disturb the end of the process."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

_THREADS = Path("/proc/self/task")
_GLOO = "pt_gloo"
_MOST, _QUIET = 5.0, 3
"""Seconds that gloo's threads are waited for, and looks in a row that must find them all asleep."""


def dismiss() -> None:
    """Give all process groups back, and `settle`."""
    if dist.is_initialized():
        dist.destroy_process_group()
    settle()


def settle() -> None:
    """Let gloo's threads let go of the tensors of work that is done.

    A model, or garbage, may keep a group and with it its threads. One of them that lets go of a tensor while Python ends
    aborts the process, after a training that was a success (pytorch/pytorch#179291).
    """
    ends, quiet = time.monotonic() + _MOST, 0
    threads = [thread for thread in _threads() if _read(thread / "comm").startswith(_GLOO)]
    while threads and quiet < _QUIET and time.monotonic() < ends:
        # Python's lock is free meanwhile: a thread that waited for it is asleep no longer.
        time.sleep(1e-3)
        quiet = 0 if any(_wants_a_core(thread) for thread in threads) else quiet + 1


def _threads() -> list[Path]:
    """This process's threads, where the system shows them."""
    return list(_THREADS.iterdir()) if _THREADS.is_dir() else []


def _wants_a_core(thread: Path) -> bool:
    return _read(thread / "stat").rpartition(") ")[2].startswith("R")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # The thread has ended.
        return ""
