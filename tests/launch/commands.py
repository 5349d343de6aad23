"""Starting `worldsize run` as a person does: a real command, real processes, real files."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STARTED: list[subprocess.Popen[str]] = []
"""What a test started; its fixture ends what is left."""

RUN = (sys.executable, "-m", "worldsize", "run")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    took: float


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """A program in `folder`."""
    path = folder / name
    path.write_text("import json, os, signal, sys, time\n" + textwrap.dedent(text), encoding="utf-8")
    return path


def start(
    *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, inside: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`worldsize run` with `args`, its output kept for `finish`; `inside` is a command that runs commands."""
    process = subprocess.Popen(
        [*inside, *RUN, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=clean(env),
        cwd=cwd,
    )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Ended:
    """Wait for the end."""
    began = time.monotonic()
    out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, out, err, time.monotonic() - began)


def run(
    *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
) -> Ended:
    """`worldsize run` from start to end."""
    return finish(start(*args, env=env, cwd=cwd), timeout)


def clean(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what would speak of ranks or threads, and with `env`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MASTER_ADDR")}
    return {**kept, **(env or {})}


def until(condition: Callable[[], bool], timeout: float = 20) -> None:
    """Wait for a condition of the outside world."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def lines(path: Path) -> list[str]:
    """The lines of a file; none where it is not there yet."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
