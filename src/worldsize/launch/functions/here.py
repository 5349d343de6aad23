"""Room: whether this process is part of a job that a function was submitted in, and which rank of it."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.launch import env

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CALL = "WORLDSIZE_CALL"
"""The job's folder, in the environment of its ranks."""
JOB, EXIT_FILE, MEMBER = "WORLDSIZE_JOB", "WORLDSIZE_EXIT_FILE", "WORLDSIZE_MEMBER"

_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


@dataclass(frozen=True, slots=True)
class Here:
    """This rank of a function's job.

    Attributes:
        folder: the job's.
        job: its id.
        member: the index in its array, 0 where there is none.
        attempt: how often Slurm started it before; restart: how often its launcher did in this attempt.
        rank, world: this one of how many.
        host: this machine.
    """

    folder: Path
    job: str
    member: int
    attempt: int
    restart: int
    rank: int
    world: int
    host: str

    @property
    def own(self) -> str:
        """Where this rank leaves what came of it, below the folder, without an ending."""
        return f"{place(self.job)}/{self.attempt}-{self.restart}/rank-{self.rank:04d}-{self.host}"


def place(job: str) -> str:
    """Where what came of a job lies, below its folder."""
    return f"outcome/{job}"


def find(environ: Mapping[str, str] | None = None) -> Here | None:
    """This rank; None where this is no such job, or a job of another kind that was submitted from inside one."""
    values = env.read() if environ is None else environ
    folder = values.get(CALL)
    if not folder or Path(values.get(EXIT_FILE, "")).parent != Path(folder):
        return None
    rank, world = next(
        ((int(values[rank]), int(values.get(size) or 1)) for rank, size in _RANKS if rank in values), (0, 1)
    )
    return Here(
        Path(folder),
        values[JOB],
        int(values.get(MEMBER) or values.get("SLURM_ARRAY_TASK_ID") or 0),
        int(values.get("SLURM_RESTART_COUNT") or 0),
        int(values.get("TORCHELASTIC_RESTART_COUNT") or 0),
        rank,
        world,
        socket.gethostname(),
    )


_numbers: Counter[str] = Counter()
_running: list[bool] = []


@contextmanager
def running() -> Iterator[None]:
    """While a job's call runs in this process."""
    _running.append(True)
    try:
        yield
    finally:
        _running.pop()


def is_running() -> bool:
    """Whether it does: what is submitted from inside runs right there."""
    return bool(_running)


def number(name: str) -> int:
    """The how manieth call of a function this is in this process: a script that is run again counts the same."""
    _numbers[name] += 1
    return _numbers[name]
