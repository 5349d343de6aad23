"""Room: how the supervisors of several nodes meet at one endpoint, share out ranks, and learn of each other's end.

Node 0's supervisor listens there; the others (`guest`) say hello and are given their ranks. A start with another run id
is refused. Where the number of nodes may change, `elastic` takes the host's place.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import ports
from worldsize.launch.channel import SILENT_S, Channel, Door, Message, News
from worldsize.launch.failure import Failure
from worldsize.launch.guest import Guest
from worldsize.launch.meeting import new_run_id, next_folder
from worldsize.launch.plan import Share, in_words
from worldsize.launch.succession import Changing
from worldsize.launch.verdict import Judge, Report, Verdict
from worldsize.runtime.network import join_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.launch.loop import Loop
    from worldsize.launch.meeting import Listener, Meeting
    from worldsize.launch.plan import Plan


def meet(loop: Loop, plan: Plan, log_dir: Path, say: Callable[[str], None]) -> Meeting:
    """The meeting of `plan.nodes` nodes at `plan.endpoint`: hosted here by node 0, or by whose address it is.

    Args:
        loop: serves it.
        plan: says where and who.
        log_dir: where attempts are counted.
        say: tells a person why it waits.

    Raises:
        LaunchError: this is node 0, but the endpoint is not an address of this machine, or the port is taken.
    """
    server = _server(plan)
    if plan.changes:
        return Changing(loop, plan, log_dir, server, say)
    return Host(loop, plan, log_dir, server) if server else Guest(loop, plan, say)


def _server(plan: Plan) -> socket.socket | None:
    """What listens at the endpoint, where this is node 0."""
    assert plan.endpoint is not None
    if plan.node:
        return None
    try:
        server = ports.listen(*plan.endpoint)
    except OSError as error:
        if plan.node is None and error.errno == errno.EADDRINUSE:
            return None
        raise LaunchError(
            f"node 0 on {socket.gethostname()} cannot listen at {join_endpoint(*plan.endpoint)}",
            found=str(error),
            do="choose another port in --rdzv-endpoint, on all nodes; or end the start that still uses it",
        ) from error
    if server or plan.node is None:
        return server
    raise LaunchError(
        f"this is node 0 and must listen at {join_endpoint(*plan.endpoint)}, but that is no address of this machine",
        found=f"host {socket.gethostname()}, --node-rank 0",
        do="start --node-rank 0 on the host of the endpoint, and every other machine with its own number: a batch "
        "script that expands $SLURM_NODEID before srun gives 0 to all",
    )


@dataclass(slots=True)
class _Member:
    """Another node, as the host knows it."""

    channel: Channel
    host: str
    nproc: int
    report: Report | None = None


class Host:
    """Node 0: listens, deals out ranks, passes failures on, decides."""

    def __init__(self, loop: Loop, plan: Plan, log_dir: Path, server: socket.socket) -> None:
        assert plan.endpoint is not None
        self._loop, self._plan, self._log_dir = loop, plan, log_dir
        self._door = Door(loop, server, self._hello)
        self._where, self._endpoint = join_endpoint(*plan.endpoint), plan.endpoint
        self._run_id = plan.run_id or new_run_id()
        self._judge = Judge(plan.max_restarts)
        self._members: dict[int, _Member] = {}
        self._lost: list[Failure] = []
        self._news = News()
        self._port: socket.socket | None = None

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

    def watch(self, listener: Listener) -> None:
        """From now on tell it when another node has failed, or was sent a signal."""
        self._news.watch(listener)

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
            overdue = self._loop.later(self._plan.peer_grace + SILENT_S, self._give_up)
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
        self._door.close()
        if self._port:
            self._port.close()
        for member in self._members.values():
            member.channel.close()

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

    def _hello(self, channel: Channel, message: Message) -> None:
        reason, node = self._refusal(message), message["node"]
        member = _Member(channel, str(message["host"]), int(message["nproc"]))
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
        if (theirs, message["least"]) != (self._plan.nodes, None):
            return f"node 0 was started with --nnodes {self._plan.nodes}, not {in_words(theirs, message['least'])}"
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
