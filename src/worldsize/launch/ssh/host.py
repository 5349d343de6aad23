"""Room: our process on one host: takes its job, says that it is ready, supervises, and never outlives the starter.

When the starter or the connection ends, its standard input does. Then the ranks are asked to stop as by SIGTERM, so that
they save, and are killed after their grace.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_FAILED, WorldsizeError
from worldsize.launch import env, local, ports
from worldsize.launch.scratch import Scratch
from worldsize.launch.ssh import wire
from worldsize.runtime import network

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worldsize.launch.plan import Plan

_MARGIN_S = 5.0
"""From the ranks' last moment to this process's."""
_ONE_HOST = "127.0.0.1"


@dataclass(slots=True)
class Line:
    """Whole lines from the starter. The first descriptor tells of its end, the last one brings the lines."""

    ends: int
    brings: int
    buffer: bytes = b""
    patience: float | None = None

    def next(self) -> str | None:
        """The next line; None: the starter is gone, or silent for longer than it may be."""
        while b"\n" not in self.buffer:
            ready, _, _ = select.select({self.ends, self.brings}, (), (), self.patience)
            data = {descriptor: os.read(descriptor, 1 << 16) for descriptor in ready}
            if not ready or data.get(self.ends) == b"":
                return None
            self.buffer += data.get(self.brings, b"")
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()


def serve(mark: str, planned: Callable[[Sequence[str]], Plan], *, pipe: bool) -> int:
    """Run what the starter asks for; the exit code.

    Args:
        mark: what its lines begin with, see `wire`.
        planned: reads a command line of `worldsize run`.
        pipe: make a named pipe for the starter's lines, as standard input brings none.
    """
    with Scratch("host") as scratch:
        line = _opened(str(scratch.path / "lines") if pipe else None, mark)
        try:
            said = _said(line, "job")
            if said is None:
                return EXIT_FAILED
            plan, kept = _ready(wire.job(said), planned, mark, line)
        except WorldsizeError as error:
            _say(mark, "error", what=error.what, found=error.found, do=error.do)
            return error.exit_code
        with kept or nullcontext():
            return _run(plan, line)


def _run(plan: Plan, line: Line) -> int:
    said = _said(line, "go")
    if said is None:
        return EXIT_FAILED
    if plan.nodes > 1:
        plan = replace(plan, endpoint=(str(said["address"]), int(said["port"])))
    threading.Thread(target=_obey, args=(line, plan.grace), daemon=True).start()
    return local.run(plan)


def _opened(pipe: str | None, mark: str) -> Line:
    """The starter's lines. Standard input becomes empty: a rank would inherit it."""
    ends = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if pipe is None:
        return Line(ends, ends)
    os.mkfifo(pipe, 0o600)
    brings = os.open(pipe, os.O_RDWR)  # also for writing: it does not end when a writer does
    _say(mark, "pipe", path=pipe)
    return Line(ends, brings)


def _said(line: Line, word: str) -> dict[str, Any] | None:
    while (text := line.next()) is not None:
        if text and (said := wire.read(text))[0] == word:
            return said[1]
    return None


def _ready(
    job: wire.Job, planned: Callable[[Sequence[str]], Plan], mark: str, line: Line
) -> tuple[Plan, socket.socket | None]:
    """The plan of this host, everything checked that can be; node 0 also has a port, bound and kept for the meeting."""
    from worldsize import __version__

    line.patience = wire.SILENT_S if job.beats else None
    env.become({**env.read(), **job.env})
    plan = planned(job.words)
    kept = ports.reserve(job.port or 0) if job.node == 0 and plan.nodes > 1 else None
    port = kept.getsockname()[1] if kept else 0
    _say(mark, "ready", version=__version__, address=job.address or _address(env.read()), port=port)
    return plan, kept


def _address(environ: dict[str, str]) -> str:
    """Where the others reach this host: where the starter did, or by its name, or towards the outside."""
    reached = environ.get("SSH_CONNECTION", "").split()[2:3]
    found = (*reached, *network.addresses(socket.gethostname()), network.outward_address())
    return next((address for address in found if address and not network.is_loopback(address)), _ONE_HOST)


def _obey(line: Line, grace: float) -> None:
    """Signals that the starter passes on reach this process as if they had been sent to it."""
    me = os.getpid()
    while (text := line.next()) is not None:
        if text:
            os.kill(me, wire.read(text)[1]["number"])
    os.kill(me, signal.SIGTERM)
    time.sleep(grace + _MARGIN_S)
    # The groups of ranks end with this process, see `shell.Group`.
    os.kill(me, signal.SIGKILL)


def _say(mark: str, word: str, **values: object) -> None:
    sys.stdout.write(wire.to_starter(mark, word, **values))
    sys.stdout.flush()
