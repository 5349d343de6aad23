"""Room: how the supervisors of several nodes meet at one endpoint, share out ranks, and learn of each other's end.

Node 0's supervisor listens there; the others say hello and are given their ranks. One JSON object a line, each with a
"kind". Nothing received is executed; a stranger's connection is dropped, and a start with another run id refused.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from worldsize.errors import LaunchError
from worldsize.launch import ports
from worldsize.launch.failure import Failure
from worldsize.launch.meeting import new_run_id, next_folder
from worldsize.launch.plan import Share
from worldsize.launch.verdict import Judge, Report, Verdict
from worldsize.runtime.network import join_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.launch.loop import Loop
    from worldsize.launch.meeting import Meeting
    from worldsize.launch.plan import Plan

_LONGEST_LINE = 1 << 22
_SEND_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 1.0
_RETRY_S = 0.1
_SILENT_S = 10.0
"""How much longer than its ranks' grace a supervisor may stay silent after a failure."""

Message = dict[str, Any]


def meet(loop: Loop, plan: Plan, log_dir: Path) -> Meeting:
    """The meeting of `plan.nodes` nodes at `plan.endpoint`: hosted here by node 0, or by whose address it is.

    Raises:
        LaunchError: this is node 0, but the endpoint is not an address of this machine, or the port is taken.
    """
    assert plan.endpoint is not None
    if plan.node:
        return Guest(loop, plan)
    try:
        server = ports.listen(*plan.endpoint)
    except OSError as error:
        if plan.node is None and error.errno == errno.EADDRINUSE:
            return Guest(loop, plan)
        raise LaunchError(
            f"node 0 on {socket.gethostname()} cannot listen at {join_endpoint(*plan.endpoint)}",
            found=str(error),
            do="choose another port in --rdzv-endpoint, on all nodes; or end the start that still uses it",
        ) from error
    if server:
        return Host(loop, plan, log_dir, server)
    if plan.node is None:
        return Guest(loop, plan)
    raise LaunchError(
        f"this is node 0 and must listen at {join_endpoint(*plan.endpoint)}, but that is no address of this machine",
        found=f"host {socket.gethostname()}, --node-rank 0",
        do="start --node-rank 0 on the host of the endpoint, and every other machine with its own number: a batch "
        "script that expands $SLURM_NODEID before srun gives 0 to all",
    )


class Channel:
    """One connection: whole messages in both directions."""

    def __init__(self, loop: Loop, connection: socket.socket) -> None:
        self._loop, self._connection, self._buffer, self._open = loop, connection, b"", True
        self.got: Callable[[Message], None] = lambda _: None
        self.lost: Callable[[], None] = lambda: None
        connection.settimeout(_SEND_TIMEOUT_S)
        _notice_silence(connection)
        loop.watch(connection.fileno(), self._readable)

    def send(self, kind: str, **values: Any) -> None:
        """Send one message. A connection that does not take it is lost."""
        if not self._open:
            return
        try:
            self._connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")
        except OSError:
            self._end()

    def close(self) -> None:
        """End the connection without a word."""
        if self._open:
            self._open = False
            self._loop.unwatch(self._connection.fileno())
            self._connection.close()

    def _readable(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        self._buffer += data
        while self._open and b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            self._message(line)
        if not data or len(self._buffer) > _LONGEST_LINE:
            self._end()

    def _message(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            assert isinstance(message["kind"], str)
        except (ValueError, KeyError, TypeError, AssertionError):
            self._end()
        else:
            self.got(message)

    def _end(self) -> None:
        if self._open:
            self.close()
            self.lost()


@dataclass(slots=True)
class _Member:
    """Another node, as the host knows it."""

    channel: Channel
    host: str
    nproc: int
    report: Report | None = None


class _News:
    """What other nodes say of the attempt, kept until somebody listens."""

    def __init__(self) -> None:
        self.failed = False
        self._numbers: list[int] = []
        self._listener: tuple[Callable[[], None], Callable[[int], None]] | None = None

    def watch(self, end: Callable[[], None], signalled: Callable[[int], None]) -> None:
        """From now on call these; at once, for what was said already."""
        self._listener = end, signalled
        for number in self._numbers:
            signalled(number)
        if self.failed:
            end()

    def failure(self) -> None:
        """Another node has failed."""
        self.failed = True
        if self._listener:
            self._listener[0]()

    def signal(self, number: int) -> None:
        """Another node was sent a signal."""
        self._numbers.append(number)
        if self._listener:
            self._listener[1](number)

    def forget(self) -> None:
        """A new attempt begins."""
        self.failed, self._numbers, self._listener = False, [], None


class Host:
    """Node 0: listens, deals out ranks, passes failures on, decides."""

    def __init__(self, loop: Loop, plan: Plan, log_dir: Path, server: socket.socket) -> None:
        assert plan.endpoint is not None
        self._loop, self._plan, self._log_dir, self._server = loop, plan, log_dir, server
        self._where, self._endpoint = join_endpoint(*plan.endpoint), plan.endpoint
        self._run_id = plan.run_id or new_run_id()
        self._judge = Judge(plan.max_restarts)
        self._members: dict[int, _Member] = {}
        self._strangers: set[Channel] = set()
        self._lost: list[Failure] = []
        self._news = _News()
        self._port: socket.socket | None = None
        server.settimeout(0)
        loop.watch(server.fileno(), self._accept)

    def begin(self) -> Share:
        """Wait for all nodes (the first time), and give each its ranks.

        Raises:
            LaunchError: not all came in time.
        """
        self._wait_for_all()
        self._news.forget()
        self._port = ports.reserve()
        folder, counts = next_folder(self._log_dir), self._counts()
        shares = [self._share(node, folder, counts) for node in range(self._plan.nodes)]
        for node, member in self._members.items():
            member.report = None
            member.channel.send("start", share=asdict(shares[node]))
        return shares[0]

    def watch(self, end: Callable[[], None], signalled: Callable[[int], None]) -> None:
        """From now on call these when another node has failed, or was sent a signal."""
        self._news.watch(end, signalled)

    def signalled(self, number: int) -> None:
        """Pass it on to the other nodes."""
        self._pass_on(number)

    def failed(self) -> None:
        """End the ranks of all nodes."""
        for member in self._members.values():
            member.channel.send("stop")

    def settle(self, report: Report) -> Verdict:
        """Wait until every node has said how it ended, decide, and tell them."""
        overdue = None
        if self._news.failed or report.failures:
            overdue = self._loop.later(self._plan.peer_grace + _SILENT_S, self._give_up)
        self._loop.run(lambda: all(member.report for member in self._members.values()))
        if overdue:
            overdue.cancel()
        if self._port:
            self._port.close()
        reports = [report, *(member.report for member in self._members.values() if member.report)]
        if self._lost:
            self._judge.max_restarts = 0
            reports.append(Report(failures=tuple(self._lost)))
        verdict = self._judge.decide(reports)
        for member in self._members.values():
            member.channel.send("verdict", verdict=verdict.to_json())
        return verdict

    def close(self) -> None:
        """Leave; the others see it."""
        self._loop.unwatch(self._server.fileno())
        self._server.close()
        if self._port:
            self._port.close()
        for channel in (*self._strangers, *(member.channel for member in self._members.values())):
            channel.close()

    # --- who is there

    def _wait_for_all(self) -> None:
        began = time.monotonic()
        late = self._loop.later(self._plan.rdzv_timeout, lambda: self._too_few(time.monotonic() - began))
        self._loop.run(lambda: len(self._members) == self._plan.nodes - 1)
        late.cancel()

    def _too_few(self, elapsed: float) -> None:
        missing = [str(node) for node in range(1, self._plan.nodes) if node not in self._members]
        raise LaunchError(
            f"only {len(self._members) + 1} of {self._plan.nodes} nodes met at {self._where} within {elapsed:.0f} s, "
            f"where node 0 ({socket.gethostname()}, this one) listens",
            found=f"missing node(s) {', '.join(missing)}",
            do="start the same command there with their --node-rank; see whether a firewall closes the port",
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        channel = Channel(self._loop, connection)
        self._strangers.add(channel)
        channel.lost = lambda: self._strangers.discard(channel)
        channel.got = lambda message: self._hello(channel, message)

    def _hello(self, channel: Channel, message: Message) -> None:
        self._strangers.discard(channel)
        try:
            reason, node = self._refusal(message), message["node"]
            member = _Member(channel, str(message["host"]), int(message["nproc"]))
        except (KeyError, TypeError, ValueError):
            channel.close()
            return
        if reason:
            channel.send("refused", reason=reason)
            channel.close()
            return
        if node is None:
            node = next(n for n in range(1, self._plan.nodes) if n not in self._members)
        self._members[node] = member
        channel.lost = lambda: self._member_lost(node, member)
        channel.got = lambda said: self._said(node, member, said)

    def _refusal(self, message: Message) -> str | None:
        run_id, node, theirs = message["run_id"], message["node"], message["nodes"]
        if run_id != (self._plan.run_id or ""):
            return f"another start listens here: its run id is {self._plan.run_id or ''!r}, not {run_id!r}"
        if theirs != self._plan.nodes:
            return f"node 0 was started with --nnodes {self._plan.nodes}, not {theirs}"
        if len(self._members) == self._plan.nodes - 1:
            return f"all {self._plan.nodes} nodes are here already"
        if node is not None and (node in self._members or not 0 < int(node) < self._plan.nodes):
            holder = self._members[node].host if node in self._members else socket.gethostname()
            return f"node rank {node} is taken by {holder}"
        return None

    def _counts(self) -> list[int]:
        return [self._plan.nproc, *(self._members[node].nproc for node in range(1, self._plan.nodes))]

    def _share(self, node: int, folder: int, counts: list[int]) -> Share:
        assert self._port is not None
        return Share(
            restarts=self._judge.restarts,
            folder=folder,
            first_rank=sum(counts[:node]),
            nproc=counts[node],
            world=sum(counts),
            node=node,
            nodes=self._plan.nodes,
            master_addr=self._endpoint[0],
            master_port=self._port.getsockname()[1],
            run_id=self._run_id,
        )

    # --- what they say

    def _said(self, node: int, member: _Member, message: Message) -> None:
        kind = message["kind"]
        try:
            if kind == "failed":
                self._stop_all()
            elif kind == "signal":
                self._pass_on(int(message["number"]), source=member)
                self._news.signal(int(message["number"]))
            elif kind == "ended":
                member.report = Report.from_json(message["report"])
        except (KeyError, TypeError, ValueError):
            self._member_lost(node, member)

    def _pass_on(self, number: int, source: _Member | None = None) -> None:
        for member in self._members.values():
            if member is not source:
                member.channel.send("signal", number=number)

    def _member_lost(self, node: int, member: _Member) -> None:
        if member.report is None:
            self._lost.append(
                Failure(
                    host=f"node {node} of {self._plan.nodes} on {member.host} is lost",
                    code=1,
                    what="its supervisor closed the connection, or the network did",
                    do=f"look at the output of the command on {member.host}",
                )
            )
            member.report = Report()
            self._stop_all()

    def _give_up(self) -> None:
        for node, member in self._members.items():
            if member.report is None:
                self._member_lost(node, member)

    def _stop_all(self) -> None:
        self.failed()
        self._news.failure()


class Guest:
    """A node that is not node 0: says hello, does as it is told."""

    def __init__(self, loop: Loop, plan: Plan) -> None:
        assert plan.endpoint is not None
        self._loop, self._plan, self._endpoint = loop, plan, plan.endpoint
        self._where = join_endpoint(*plan.endpoint)
        self._name = f"node {'?' if plan.node is None else plan.node} on {socket.gethostname()}"
        self._channel: Channel | None = None
        self._began = time.monotonic()
        self._why = "nobody answered"
        self._share: Share | None = None
        self._verdict: Verdict | None = None
        self._gone = False
        self._news = _News()

    def begin(self) -> Share:
        """Wait for node 0 to start the attempt.

        Raises:
            LaunchError: it could not be reached in time, or refused this node.
        """
        self._share = self._verdict = None
        late = self._loop.later(self._plan.rdzv_timeout, self._too_late)
        if self._channel is None:
            self._connect()
        self._loop.run(lambda: self._share is not None)
        late.cancel()
        assert self._share is not None
        return self._share

    def watch(self, end: Callable[[], None], signalled: Callable[[int], None]) -> None:
        """From now on call these when another node has failed, or was sent a signal."""
        self._news.watch(end, signalled)

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
        if self._channel:
            self._channel.send("ended", report=report.to_json())
        self._loop.run(lambda: self._verdict is not None or self._gone)
        self._news.forget()
        if self._verdict is not None:
            return self._verdict
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
            connection = socket.create_connection(self._endpoint, timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            self._why = str(error)
            self._loop.later(_RETRY_S, self._connect)
            return
        self._why = "node 0 is there, but has not started the ranks: other nodes are missing"
        self._channel = channel = Channel(self._loop, connection)
        channel.got, channel.lost = self._told, self._lost
        plan = self._plan
        hello = {"run_id": plan.run_id or "", "node": plan.node, "nproc": plan.nproc, "nodes": plan.nodes}
        channel.send("hello", host=socket.gethostname(), **hello)

    def _told(self, message: Message) -> None:
        if message["kind"] == "start":
            self._share = Share(**message["share"])
        elif message["kind"] == "stop":
            self._news.failure()
        elif message["kind"] == "signal":
            self._news.signal(int(message["number"]))
        elif message["kind"] == "verdict":
            self._verdict = Verdict.from_json(message["verdict"])
        elif message["kind"] == "refused":
            raise LaunchError(
                f"node 0 at {self._where} refused {self._name}: {message['reason']}",
                do="give every node the same --nnodes and --rdzv-id, and its own --node-rank",
            )

    def _lost(self) -> None:
        self._gone = True
        if self._share is None:
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


def _notice_silence(connection: socket.socket) -> None:
    """Let the kernel find out, within half a minute, that the other machine has gone without a word."""
    options = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),)
    options += tuple(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 30_000),
        )
        if hasattr(socket, name)
    )
    for level, option, value in options:
        connection.setsockopt(level, option, value)
