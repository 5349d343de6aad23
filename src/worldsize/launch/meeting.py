"""Room: what the supervisor of a node needs of the other nodes, and the answer where there are none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from worldsize.launch import ports
from worldsize.launch.plan import Share
from worldsize.launch.verdict import Judge, Report, Verdict

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.launch.plan import Plan

ATTEMPTS = "attempts"


class Meeting(Protocol):
    """The nodes of one job. `begin`, `settle`, `begin`, `settle` ... on every node, until a verdict is final."""

    def begin(self) -> Share:
        """This node's place in the next attempt. Waits for the other nodes."""
        ...

    def watch(self, end: Callable[[], None], signalled: Callable[[int], None]) -> None:
        """From now on call `end` when another node has failed, and `signalled` when it was sent a signal."""
        ...

    def signalled(self, number: int) -> None:
        """Tell the other nodes that this one was sent a signal: it is meant for all ranks."""
        ...

    def failed(self) -> None:
        """Tell the other nodes that this one has failed, so that they end too."""
        ...

    def settle(self, report: Report) -> Verdict:
        """Exchange how the attempt ended. Waits for the other nodes to end."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class Alone:
    """One node: nobody to meet. Holds the port of rank 0's store for the length of each attempt."""

    def __init__(self, plan: Plan, log_dir: Path) -> None:
        self._plan, self._log_dir = plan, log_dir
        self._judge = Judge(plan.max_restarts)
        self._run_id = plan.run_id or new_run_id()
        self._port: socket.socket | None = None

    def begin(self) -> Share:
        """All ranks are here."""
        self._port = ports.reserve(self._plan.master_port or 0)
        return Share(
            restarts=self._judge.restarts,
            folder=next_folder(self._log_dir),
            first_rank=0,
            nproc=self._plan.nproc,
            world=self._plan.nproc,
            node=0,
            nodes=1,
            master_addr="127.0.0.1",
            master_port=self._port.getsockname()[1],
            run_id=self._run_id,
        )

    def watch(self, end: Callable[[], None], signalled: Callable[[int], None]) -> None:
        """Nobody else can fail."""

    def signalled(self, number: int) -> None:
        """Nobody to tell."""

    def failed(self) -> None:
        """Nobody to tell."""

    def settle(self, report: Report) -> Verdict:
        """The verdict over this node alone."""
        self.close()
        return self._judge.decide([report])

    def close(self) -> None:
        """Give the port back."""
        if self._port:
            self._port.close()


def new_run_id() -> str:
    """A name that no other start has."""
    return os.urandom(16).hex()


def next_folder(log_dir: Path) -> int:
    """The first number under `attempts/` that is free, made now: an earlier use of the folder keeps its logs."""
    attempts = log_dir / ATTEMPTS
    attempts.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in attempts.iterdir())
    while True:
        try:
            (attempts / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return number
