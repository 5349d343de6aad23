"""Room: a node that is not node 0: says hello at the endpoint, does as it is told, tells how it ended."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch.channel import Channel, Message, News
from worldsize.launch.failure import Failure
from worldsize.launch.plan import Share
from worldsize.launch.verdict import Judge, Report, Verdict
from worldsize.runtime.network import join_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.launch.loop import Loop, Timer
    from worldsize.launch.meeting import Listener
    from worldsize.launch.plan import Plan

_CONNECT_TIMEOUT_S = 1.0
_RETRY_S = 0.1


class Guest:
    """A node that is not node 0: says hello, does as it is told.

    Args:
        loop: serves it.
        plan: says where node 0 is.
        say: tells a person why it waits.
        heir: the port on which it would listen in place of node 0.
    """

    def __init__(self, loop: Loop, plan: Plan, say: Callable[[str], None], *, heir: int = 0) -> None:
        assert plan.endpoint is not None
        self._loop, self._plan, self.endpoint, self._say, self._heir = loop, plan, plan.endpoint, say, heir
        self._where = join_endpoint(*plan.endpoint)
        number = "" if plan.changes else f"node {'?' if plan.node is None else plan.node} on "
        self._name = f"{number}{socket.gethostname()}"
        self._channel: Channel | None = None
        self._began = time.monotonic()
        self._why = "nobody answered"
        self.share: Share | None = None
        """The place in this attempt, or in the last one."""
        self._next: Share | None = None
        self.heirs: list[tuple[str, int]] = []
        """Who takes node 0's place, the first of them that is left."""
        self._verdict: Verdict | None = None
        self._late: Timer | None = None
        self._idle, self._begins = True, False
        """No attempt runs here. What belongs to the next one may come together with the verdict over the last."""
        self.gone = self.abandoned = False
        """Node 0 is lost; and it was lost before it said what follows from the last attempt."""
        self._news = News()

    def begin(self) -> Share | Verdict:
        """Wait for node 0 to start the attempt; a verdict where it ended without this node.

        Raises:
            LaunchError: it could not be reached in time, or refused this node.
        """
        self._late = self._loop.later(self._plan.rdzv_timeout, self._too_late)
        if self._channel is None:
            self._connect()
        elif self._plan.changes:
            self._late.cancel()  # node 0 waits for others, and says when that is over
        self._begins = True
        if self.gone:
            self._lost()
        self._loop.run(lambda: self._next is not None or self._verdict is not None)
        self._begins = False
        self._late.cancel()
        if self._next is None:
            assert self._verdict is not None
            return self._verdict
        self.share, self._next, self._idle = self._next, None, False
        return self.share

    def watch(self, listener: Listener) -> None:
        """From now on tell it what node 0 says of the others."""
        self._news.watch(listener)

    def signalled(self, number: int) -> None:
        """Tell node 0."""
        if self._channel:
            self._channel.send("signal", number=number)

    def failed(self) -> None:
        """Tell node 0."""
        if self._channel:
            self._channel.send("failed")

    def settle(self, report: Report) -> Verdict:
        """Tell node 0 how it ended here, and wait for what it decides."""
        self._idle = True
        if self._channel:
            self._channel.send("ended", report=report.to_json())
        self._loop.run(lambda: self._verdict is not None or self.gone)
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            return verdict
        self.abandoned = True
        gone = Failure(
            host=f"node 0 of {self._plan.nodes} at {self._where} is lost",
            code=1,
            what="its supervisor closed the connection, or the network did",
            do="look at the output of the command there",
        )
        return Judge().decide([report, Report(failures=(gone,))])

    def close(self) -> None:
        """Leave; node 0 sees it."""
        if self._channel:
            self._channel.close()

    def _connect(self) -> None:
        try:
            connection = socket.create_connection(self.endpoint, timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            self._why = str(error)
            self._loop.later(_RETRY_S, self._connect)
            return
        self._why = "node 0 is there, but has not started the ranks: other nodes are missing"
        self._channel = channel = Channel(self._loop, connection)
        channel.got, channel.lost = self._told, self._lost
        plan = self._plan
        hello = {"run_id": plan.run_id or "", "node": plan.node, "nproc": plan.nproc, "nodes": plan.nodes}
        hello |= {"least": plan.least, "least_nproc": plan.least_nproc, "port": self._heir}
        channel.send("hello", host=socket.gethostname(), **hello)

    def _told(self, message: Message) -> None:
        if message["kind"] == "start":
            self._next = Share(**message["share"])
            self._inherit(message)
        elif message["kind"] == "stop":
            self._news.failure()
        elif message["kind"] == "change":
            self._news.change()
        elif message["kind"] == "waiting":
            self.share = None
            self._inherit(message)
            self._wait(str(message["why"]))
        elif message["kind"] == "signal":
            self._news.signal(int(message["number"]))
        elif message["kind"] == "verdict":
            self._verdict = Verdict.from_json(message["verdict"])
            if self._idle:
                self._news.forget()
        elif message["kind"] == "refused":
            raise LaunchError(
                f"node 0 at {self._where} refused {self._name}: {message['reason']}",
                do="give every node the same --nnodes and --rdzv-id, and its own --node-rank",
            )

    def _inherit(self, message: Message) -> None:
        self.heirs = [(str(host), int(port)) for host, port in message.get("heirs", ())]

    def _wait(self, why: str) -> None:
        """Node 0 knows this node, and has no ranks for it now: it has all the time."""
        if self._late:
            self._late.cancel()
        self._say(f"{self._name} waits at {self._where}: {why}")

    def _lost(self) -> None:
        self.gone = True
        if self._begins and self._next is None and self._verdict is None:
            raise LaunchError(
                f"{self._name} was talking to node 0 at {self._where}, which closed the connection before the start",
                found=f"after {time.monotonic() - self._began:.0f} s",
                do="look at the output of node 0; see whether something else than `worldsize run` listens there",
            )
        self._news.failure()

    def _too_late(self) -> None:
        raise LaunchError(
            f"{self._name} waited {time.monotonic() - self._began:.0f} s at {self._where} for node 0, which should "
            "listen there",
            found=self._why,
            do="start the command with --node-rank 0 on that host; see whether a firewall closes the port; "
            "--rdzv-timeout sets how long to wait",
        )
