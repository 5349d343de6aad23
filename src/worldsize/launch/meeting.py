"""Room: what the supervisor of a node needs of the other nodes, and the answer where there are none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from worldsize.launch import ports
from worldsize.launch.plan import Share
from worldsize.launch.slots import Slots, Tally
from worldsize.launch.verdict import Judge, Report, Verdict

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from worldsize.launch.plan import Plan

ATTEMPTS = "attempts"


class Listener(Protocol):
    """Who is told of other nodes: an attempt."""

    def end(self) -> None:
        """Another node has failed."""
        ...

    def signal_elsewhere(self, number: int) -> None:
        """Another node was sent a signal."""
        ...

    def give_way(self) -> None:
        """Another node joins: this attempt is to end with everything committed, and the next one begins."""
        ...


class Meeting(Protocol):
    """The nodes of one job. `begin`, `settle`, `begin`, `settle` ... on every node, until a verdict is final."""

    def begin(self) -> Share | Verdict:
        """This node's place in the next attempt. Waits for the other nodes. A verdict: it ended without this node."""
        ...

    def watch(self, listener: Listener) -> None:
        """From now on tell of the other nodes."""
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
        self._judge = Judge(plan.max_restarts, renews=plan.least_nproc is not None)
        self._slots = Tally(plan.slot_retries, [Slots(plan.nproc, plan.least_nproc)])
        self._run_id = plan.run_id or new_run_id()
        self._port: socket.socket | None = None

    def begin(self) -> Share:
        """All ranks are here."""
        self._port = ports.reserve(self._plan.master_port or 0)
        return Share(
            restarts=self._judge.restarts,
            folder=next_folder(self._log_dir),
            first_rank=0,
            nproc=self._slots.nodes[0].count,
            world=self._slots.nodes[0].count,
            node=0,
            nodes=1,
            master_addr="127.0.0.1",
            master_port=self._port.getsockname()[1],
            run_id=self._run_id,
        )

    def watch(self, listener: Listener) -> None:
        """Nobody else can fail, or join."""

    def signalled(self, number: int) -> None:
        """Nobody to tell."""

    def failed(self) -> None:
        """Nobody to tell."""

    def settle(self, report: Report) -> Verdict:
        """The verdict over this node alone."""
        self.close()
        self._slots.nodes[0].recount(report)
        return self._judge.decide([report], self._slots.remedy)

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
