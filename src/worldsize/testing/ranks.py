"""Room: a function on n real gloo ranks of this machine. The processes can be kept, so that torch is imported once."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import cloudpickle

from worldsize.errors import LaunchError
from worldsize.launch import env, ports
from worldsize.launch.plan import Plan, Share
from worldsize.launch.shell import Group
from worldsize.testing.worker import MEETING, Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

T = TypeVar("T")

_START = 120.0
"""Seconds that processes may take to come up on a busy machine."""
_WORKER = """\
import json, sys
with open(sys.argv[1] + "/path.json") as file:
    sys.path[:] = json.load(file)
from worldsize.testing.worker import main
main(sys.argv[1])"""


def run_ranks(fn: Callable[..., T], size: int, *args: Any, timeout: float = 120.0) -> list[T]:
    """Call `fn(*args)` on `size` fresh gloo ranks and return the results by rank.

    Args:
        fn: a function that may use a `Run` or `worldsize.runtime.session`; pickled like a module's own, by name.
        size: how many ranks.
        args: its arguments, equal for all ranks.
        timeout: seconds for the call.

    Raises:
        Exception: the exception of the rank that failed first, its remote traceback as a note.
        LaunchError: a rank died, or the time is over; with the end of what it printed.
    """
    with RankPool(size) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """`size` processes that run one function after another, each time in a world opened anew.

    Args:
        size: how many ranks.
        options: further environment variables of the ranks.
    """

    def __init__(self, size: int, options: Mapping[str, str] | None = None) -> None:
        self.size, self._options = size, {"OMP_NUM_THREADS": "1", **(options or {})}
        self._folder: Path | None = None
        self._group: Group | None = None
        self._lines: list[Connection] = []

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
        """See `run_ranks`. After an error the processes are started anew by the next call."""
        if not self._lines:
            self._start()
        port = ports.reserve()
        try:
            for line in self._lines:
                line.send((port.getsockname()[1], cloudpickle.dumps((fn, args))))
            return self._results(timeout)
        except BaseException:
            self.close()
            raise
        finally:
            port.close()

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for line in self._lines:
            line.close()
        self._lines = []
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(prefix="worldsize-ranks-"))
        (folder / "path.json").write_text(json.dumps(sys.path), encoding="utf-8")
        self._group = Group()
        with Listener(str(folder / MEETING)) as listener:
            start_ranks(self._group, (sys.executable, "-u", "-c", _WORKER, str(folder)), self.size, folder, self._options)
            self._lines = self._met(listener)

    def _met(self, listener: Listener) -> list[Connection]:
        sock: Any = listener._listener._socket  # type: ignore[attr-defined] # noqa: SLF001 - it has no other timeout
        sock.settimeout(_START)
        found: dict[int, Connection] = {}
        while len(found) < self.size:
            try:
                line = listener.accept()
            except TimeoutError:
                missing = min(set(range(self.size)) - set(found))
                raise self._died(missing, f"did not come up in {_START:.0f} s") from None
            found[line.recv()] = line
        return [found[rank] for rank in range(self.size)]

    def _results(self, timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        found: dict[int, Any] = {}
        while len(found) < self.size:
            open_lines = [line for rank, line in enumerate(self._lines) if rank not in found]
            ready = wait(open_lines, max(0.0, end - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(found))
                raise self._died(missing[0], f"and {len(missing) - 1} more: no result in {timeout:.0f} s")
            for line in ready:
                rank = self._lines.index(line)  # type: ignore[arg-type]
                found[rank] = self._value(rank)
        return [found[rank] for rank in range(self.size)]

    def _value(self, rank: int) -> Any:
        try:
            answer: Answer = cloudpickle.loads(self._lines[rank].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._died(rank, "died") from None
        if answer.trace is None:
            return answer.value
        error = answer.error or LaunchError(f"rank {rank} of {self.size} failed; its exception cannot be sent here")
        error.add_note(f"\nOn rank {rank} of {self.size}:\n{answer.trace}")
        raise error

    def _died(self, rank: int, how: str) -> LaunchError:
        assert self._folder is not None
        return LaunchError(f"rank {rank} of {self.size} {how}", found=tail(log_file(self._folder, rank)))


def start_ranks(group: Group, argv: Sequence[str], size: int, folder: Path, options: Mapping[str, str]) -> int:
    """Start the ranks of one world in a process group, their output in files (`log_file`). Returns the master's port.

    The port is free at this moment; to hold it, set MASTER_PORT in `options` from one that is reserved.
    """
    port = ports.reserve()
    number = int(options.get("MASTER_PORT", port.getsockname()[1]))
    plan = Plan(argv=tuple(argv), nproc=size, options=options)
    share = Share(
        restarts=0, folder=0, first_rank=0, nproc=size, world=size, node=0, nodes=1,
        master_addr="127.0.0.1", master_port=number, run_id="testing",
    )  # fmt: skip
    for rank in range(size):
        shell = ("/bin/sh", "-c", 'exec >>"$0" 2>&1; exec "$@"', str(log_file(folder, rank)), *argv)
        group.start(shell, {**env.for_rank(env.read(), plan, share, rank, folder), **options})
    port.close()
    return number


def log_file(folder: Path, rank: int) -> Path:
    """What a rank printed, standard error included."""
    return folder / f"rank-{rank:04d}.log"


def tail(file: Path, size: int = 2000) -> str:
    """The end of a text file; a word where there is none."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return text[-size:].strip() or "it printed nothing"
