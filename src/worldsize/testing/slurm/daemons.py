"""Room: processes known by id and start, so that only they are ever signalled, by whoever comes to stop them.

Each writes its own record before it becomes the daemon, so there is no moment at which one runs unrecorded.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

SIGN = (
    "read -r pid a b c d e f g h i j k l m n o p q r s t start rest </proc/self/stat\n"
    'echo "$pid $start" >"$0"\n'
)  # fmt: skip
"""For a shell whose $0 is the record: the fields of proc(5) that name its process, as the kernel that mounted /proc sees it."""

_FOREGROUND = SIGN + 'log=$1; shift; exec "$@" </dev/null >>"$log" 2>&1'
_BACKGROUND = 'setsid /bin/sh -c "$0" "$@" </dev/null >/dev/null 2>&1 &'


@dataclass(frozen=True, slots=True)
class Record:
    """One process, now or once."""

    name: str
    pid: int
    start: int
    """In clock ticks after the machine's own start."""

    @property
    def alive(self) -> bool:
        """Whether it runs. A zombie does not: whoever should reap it may be slow."""
        state = _state(self.pid)
        return state is not None and state[0] not in "ZX" and state[1] == self.start

    def send(self, number: int) -> None:
        """Signal exactly this process. Nothing happens where it has ended."""
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


class Daemons:
    """The processes of one folder.

    Args:
        folder: holds `run`, for the records, and `log`, for what they print.
        outlive: whether they go on after this process; else they end with it, however it ends.
    """

    def __init__(self, folder: Path, *, outlive: bool) -> None:
        self._folder = folder
        self._group = None if outlive else shell.Group()
        self._children: list[shell.Child] = []

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process that stays in the foreground."""
        record = self.file(name)
        record.unlink(missing_ok=True)
        rest = (str(record), str(self.log(name)), *argv)
        if self._group is not None:
            self._children.append(self._group.start(("/bin/sh", "-c", _FOREGROUND, *rest), env))
        else:
            shell.call(("/bin/sh", "-c", _BACKGROUND, _FOREGROUND, *rest), env)

    def find(self, name: str) -> Record | None:
        """The record of that name, None where there is none."""
        return read(self.file(name))

    def running(self) -> dict[str, Record]:
        """Every recorded process that runs, by name."""
        found = (read(path) for path in sorted((self._folder / "run").glob("*.record")))
        return {record.name: record for record in found if record is not None and record.alive}

    def stop(self, records: Iterable[Record]) -> None:
        """SIGKILL, as all that they know goes with the folder; returns when they are gone.

        Raises:
            LaunchError: one of them does not even end by that.
        """
        left = list(records)
        for record in left:
            record.send(signal.SIGKILL)
        if not until(lambda: not any(record.alive for record in left), 10.0, 0.01):
            names = ", ".join(f"{record.name} (pid {record.pid})" for record in left if record.alive)
            raise LaunchError("a process does not end by SIGKILL", found=names, do="see what it waits for")
        self.reap()

    def reap(self) -> None:
        """Take note of children that have ended."""
        for child in [child for child in self._children if child.code is not None]:
            child.close()
            self._children.remove(child)

    def close(self) -> None:
        """End those that were to end with this process."""
        if self._group is None:
            return
        self._group.close()
        self._group = None
        self.reap()

    def file(self, name: str) -> Path:
        """Where a process of that name is recorded."""
        return self._folder / "run" / f"{name}.record"

    def ready(self, name: str) -> Path:
        """What a machine of that name makes when it has come up."""
        return self._folder / "run" / f"{name}.record.up"

    def log(self, name: str) -> Path:
        """Where it prints to."""
        return self._folder / "log" / f"{name}.out"


def until(fact: Callable[[], bool], timeout: float, tick: float = 0.05) -> bool:
    """Whether it becomes true within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not fact():
        if time.monotonic() > end:
            return False
        time.sleep(tick)
    return True


def read(path: Path) -> Record | None:
    """What a record says; None where there is none or it is being written."""
    with suppress(FileNotFoundError, ValueError):
        pid, start = path.read_text(encoding="ascii").split()
        return Record(path.stem, int(pid), int(start))
    return None


def identify(pid: int) -> Record | None:
    """The process that has this id now."""
    state = _state(pid)
    return None if state is None else Record(f"process {pid}", pid, state[1])


def _state(pid: int) -> tuple[str, int] | None:
    """The letter of its state and its start."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])
