"""The processes that make batches end with the rank, however it ends, and by nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.samples import Numbers, loader
from worldsize.data.batch import BatchPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Large(Numbers):
    """Samples of which one fills a pipe; once a file is there, none comes any more."""

    def __init__(self, block: Path) -> None:
        super().__init__(40)
        self._block = block

    def __getitem__(self, index: int) -> torch.Tensor:
        while self._block.exists():
            time.sleep(0.1)
        return torch.full((12_000,), float(index), dtype=torch.float64)


def rank(folder: Path, method: str, end: Callable[[], None], *, stuck: bool) -> None:
    """A rank that says who its workers are, and ends in the middle of its data while they are busy."""
    data = DataLoader(Large(folder / "block"), 1, num_workers=2, multiprocessing_context=method)
    steps = loader(data, BatchPlan(40, 2, 1)).steps(0, 20)
    next(steps)
    children = [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]
    (folder / "pids").write_text(" ".join(str(child.pid) for child in children))
    if stuck:
        (folder / "block").touch()
        next(steps)
    time.sleep(1)
    end()


def leave() -> None:
    """As after a stop."""
    sys.exit(75)


def die() -> None:
    """As when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("method", "end", "code", "stuck"),
    [
        ("fork", leave, 75, True),
        ("spawn", leave, 75, True),
        ("fork", die, -signal.SIGKILL, True),
        ("spawn", die, -signal.SIGKILL, False),
    ],
)
def test_they_end_with_the_rank(
    tmp_path: Path, method: str, end: Callable[[], None], code: int, *, stuck: bool
) -> None:
    """Also while they wait for a sample, or for somebody to take what they have made."""
    process = multiprocessing.get_context("spawn").Process(
        target=rank, args=(tmp_path, method, end), kwargs={"stuck": stuck}
    )
    process.start()
    process.join(30)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    ends = time.monotonic() + 15
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < ends:
        time.sleep(0.05)
    found = process.exitcode
    process.kill()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2
    assert (found, left) == (code, [])


def running(pid: int) -> bool:
    """Whether a process is there, and no corpse."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
