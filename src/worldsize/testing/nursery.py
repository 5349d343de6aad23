"""Room: processes that begin with torch imported. One process imports it once and forks the ranks of any world.

On a small machine most of a short run's time is `import torch`, once for each rank. What is forked here has made no
thread and no tensor yet, so it is as good as a fresh process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from typing import TYPE_CHECKING, Any

import cloudpickle

from worldsize.errors import LaunchError
from worldsize.launch import env, ports
from worldsize.launch.plan import Plan, Share
from worldsize.launch.scratch import Scratch
from worldsize.launch.shell import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SOCKET = "socket"
"""The name of a meeting point in a folder."""

_START = 120.0
"""Seconds that processes may take to come up on a busy machine."""
_CHILD = """\
import json, sys
with open(sys.argv[1] + "/path.json") as file:
    sys.path[:] = json.load(file)
from worldsize.testing.worker import nurse
nurse(sys.argv[1])"""


@dataclass(frozen=True, slots=True)
class Birth:
    """What the nursery is asked for."""

    call: bytes
    """(function, arguments, named arguments), pickled."""
    env: Mapping[str, str]
    log: Path
    group: int
    """The process group to join; 0 for one of its own."""


class Nursery:
    """Forks processes on request. All of them end with this object, and with this process however that ends."""

    def __init__(self) -> None:
        self._scratch = Scratch("nursery")
        self._folder = self._scratch.path
        (self._folder / "path.json").write_text(json.dumps(sys.path), encoding="utf-8")
        self._group = Group()
        shell = ("/bin/sh", "-c", 'exec >>"$0" 2>&1; exec "$@"', str(self._folder / "log"))
        with Listener(str(self._folder / SOCKET)) as listener:
            argv = (*shell, sys.executable, "-u", "-c", _CHILD, str(self._folder))
            self._child = self._group.start(argv, {**env.read(), "OMP_NUM_THREADS": "1"})
            self._line = accept(listener, 1, lambda _: tail(self._folder / "log"))[0]

    def fork(self, birth: Birth) -> int:
        """One process that makes the call and ends with its outcome. Returns its id."""
        self._line.send(birth)
        return int(self._line.recv())

    def code(self, pid: int) -> int | None:
        """The exit code of one of its processes, -n after signal n; None while it runs. Asked for until it is known."""
        self._line.send(pid)
        found: int | None = self._line.recv()
        return found

    def close(self) -> None:
        """End it and everything it forked."""
        self._line.close()
        self._group.close()
        self._child.close()
        self._scratch.remove()


class Crew:
    """The ranks of one world in one process group.

    Args:
        size: how many ranks.
        folder: where what they print goes (`log_file`), appended.
        options: further environment variables.
    """

    def __init__(self, size: int, folder: Path, options: Mapping[str, str] | None = None) -> None:
        self.size, self.folder, self._options = size, folder, dict(options or {})
        self._port = ports.reserve()
        self.pids: list[int] = []
        self._codes: dict[int, int] = {}

    def start(self, fn: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Let every rank call `fn(*args, **named)`; what it returns is lost, an exception ends the process as usual."""
        self.folder.mkdir(parents=True, exist_ok=True)
        call = cloudpickle.dumps((fn, args, named))
        for rank in range(self.size):
            birth = Birth(call, self._env(rank), log_file(self.folder, rank), self.pids[0] if self.pids else 0)
            self.pids.append(nursery().fork(birth))

    def codes(self) -> list[int | None]:
        """The exit codes by rank, None for those that run."""
        for pid in self.pids:
            if pid not in self._codes and (code := nursery().code(pid)) is not None:
                self._codes[pid] = code
        return [self._codes.get(pid) for pid in self.pids]

    def wait(self, timeout: float) -> list[int | None]:
        """The exit codes, as soon as all have ended or the time is over."""
        end = time.monotonic() + timeout
        while None in (codes := self.codes()) and time.monotonic() < end:
            time.sleep(0.01)
        return codes

    def kill(self) -> None:
        """SIGKILL to the process group, all ranks and their threads and children at once; returns when they are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pids[0], signal.SIGKILL)
        self.wait(_START)

    def close(self) -> None:
        """End what still runs."""
        if self.pids:
            self.kill()
        self._port.close()

    def said(self) -> str:
        """The end of what each rank printed."""
        return "\n".join(f"rank {rank}: {tail(log_file(self.folder, rank))}" for rank in range(self.size))

    def _env(self, rank: int) -> dict[str, str]:
        share = Share(
            restarts=0, folder=0, first_rank=0, nproc=self.size, world=self.size, node=0, nodes=1,
            master_addr="127.0.0.1", master_port=self._port.getsockname()[1], run_id="testing",
        )  # fmt: skip
        plan = Plan(argv=(), nproc=self.size, options=self._options)
        # No launcher watches: a rank says its last words itself.
        return {**env.for_rank(env.read(), plan, share, rank, self.folder), "WORLDSIZE_LAUNCHER": ""}


_shared: list[Nursery] = []


def nursery() -> Nursery:
    """The nursery of this process, made at the first call."""
    if not _shared:
        _shared.append(Nursery())
        atexit.register(_shared[0].close)
    return _shared[0]


def accept(listener: Listener, count: int, said: Callable[[int], str]) -> list[Connection]:
    """Wait for `count` processes, each of which sends its number first. Raises LaunchError naming one that is missing."""
    sock: Any = listener._listener._socket  # type: ignore[attr-defined] # noqa: SLF001 - it offers no timeout
    sock.settimeout(_START)
    found: dict[int, Connection] = {}
    while len(found) < count:
        try:
            line = listener.accept()
        except TimeoutError:
            missing = min(set(range(count)) - set(found))
            raise LaunchError(f"process {missing} of {count} did not come up", found=said(missing)) from None
        found[line.recv()] = line
    return [found[number] for number in range(count)]


def log_file(folder: Path, rank: int) -> Path:
    """What a rank printed, standard error included."""
    return folder / f"rank-{rank:04d}.log"


def tail(file: Path, size: int = 2000) -> str:
    """The end of a text file; a word where there is none."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return text[-size:].strip() or "it printed nothing"
