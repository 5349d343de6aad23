"""Room: node 0 of a world whose nodes come and go: who is in the next attempt, who waits, when it begins anew.

A node that is lost ends the attempt, and those that are left begin the next one. A node that comes is told to wait; the
ranks are asked to end with everything committed, and the next attempt has it too. Whoever is too many waits until
another is lost, and so does a node with which the world did not get to work: a running training never ends because of it.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_USAGE, LaunchError
from worldsize.launch import ports
from worldsize.launch.channel import SILENT_S, Channel, Door, Message, News
from worldsize.launch.failure import Failure
from worldsize.launch.meeting import new_run_id, next_folder
from worldsize.launch.plan import Share, in_words
from worldsize.launch.slots import Slots, Tally, placed, ranks
from worldsize.launch.verdict import Judge, Remedy, Report, Verdict
from worldsize.runtime.network import is_loopback, join_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.launch.loop import Loop, Timer
    from worldsize.launch.meeting import Listener
    from worldsize.launch.plan import Plan


@dataclass(slots=True, eq=False)
class Member:
    """Another node. `share` is its place in the attempt; None: it waits."""

    channel: Channel
    host: str
    slots: Slots
    heir: tuple[str, int]
    """Where it would listen in place of node 0."""
    share: Share | None = None
    report: Report | None = None
    lost: bool = False
    unfit: str = ""
    """Why it is left out for good."""


@dataclass(slots=True)
class Members:
    """All other nodes, in the order in which they came, and who of them are to be in the next attempt.

    Args:
        most: nodes, with node 0.
        own: the slots of node 0.
    """

    most: int
    own: Slots
    all: list[Member] = field(default_factory=list)
    below: int | None = None
    """A world of so many ranks was refused."""
    why: str = ""
    """With which words."""

    @property
    def at_work(self) -> list[Member]:
        """Those in this attempt, in the order of their nodes."""
        working = [(member.share.node, member) for member in self.all if member.share is not None]
        return [member for _, member in sorted(working, key=lambda pair: pair[0])]

    @property
    def chosen(self) -> list[Member]:
        """Those for the next one: who is at work stays, then who came first."""
        found: list[Member] = []
        waiting = [member for member in self.all if member.share is None]
        for member in (*self.at_work, *waiting):
            fits = self.below is None or self.count([*found, member]) < self.below
            if len(found) + 1 < self.most and fits and not member.unfit and not member.lost:
                found.append(member)
        return found

    def count(self, members: list[Member]) -> int:
        """Ranks of node 0 and these."""
        return self.own.count + sum(member.slots.count for member in members)

    def words(self, members: list[Member]) -> str:
        """Node 0 and these."""
        return f"{ranks(self.count(members))} on {nodes(len(members) + 1)}"

    def why_waits(self, member: Member) -> str:
        """What somebody is told who is not in this attempt."""
        if member.unfit:
            return member.unfit
        if member in self.chosen:
            return "the running world is asked to let it in"
        if len(self.chosen) + 1 >= self.most:
            return f"{nodes(self.most)} of at most {self.most} are at work; it comes in when one is lost"
        return f"a world of {ranks(self.below or 0)} was refused: {self.why}; it comes in when another node is lost"


class MovedError(Exception):
    """Another node has taken node 0's place before this one began."""

    def __init__(self, endpoint: tuple[str, int]) -> None:
        super().__init__(endpoint)
        self.endpoint = endpoint


class Leader:
    """Node 0 where the number of nodes may change: listens, deals out ranks, lets nodes in, decides.

    Args:
        loop: serves it.
        plan: which numbers of nodes are allowed.
        log_dir: where attempts are counted.
        server: listens at the endpoint.
        say: tells a person what it waits for.
        before: the last attempt under another node 0, whose place this one takes.
    """

    def __init__(
        self,
        loop: Loop,
        plan: Plan,
        log_dir: Path,
        server: socket.socket,
        say: Callable[[str], None],
        *,
        before: Share | None = None,
    ) -> None:
        assert plan.endpoint is not None
        assert plan.least is not None
        self._loop, self._plan, self._log_dir, self._say = loop, plan, log_dir, say
        self._least, self._endpoint, self._where = plan.least, plan.endpoint, join_endpoint(*plan.endpoint)
        self._most_expected = before.nodes - 1 if before else plan.nodes
        self._run_id = before.run_id if before else plan.run_id or new_run_id()
        self._judge = Judge(plan.max_restarts, restarts=before.restarts + 1 if before else 0, renews=True)
        self._members = Members(plan.nodes, Slots(plan.nproc, plan.least_nproc))
        self._lost: list[Failure] = []
        self.share: Share | None = None
        self._came: list[Member] = []
        self._runs = self._asked = self._over = False
        self._heard = time.monotonic()
        self._call: Timer | None = None
        self._news = News()
        self._port: socket.socket | None = None
        self._door = Door(loop, server, self._hello)

    def begin(self) -> Share:
        """Wait until there are enough nodes, and give each its ranks.

        Raises:
            LaunchError: too few came in time.
        """
        self._wait_for_enough()
        self._news.forget()
        self._runs, self._asked, self._lost = True, False, []
        self._port = ports.reserve()
        self._members.all = [member for member in self._members.all if not member.lost]
        chosen = self._members.chosen
        self._came = [member for member in chosen if member.share is None] if self.share else []
        self.share, *shares = self._shares(chosen)
        for member in self._members.all:
            member.share = member.report = None
        for member, share in zip(chosen, shares, strict=True):
            member.share = share
        for member in self._members.all:
            if member.share is None:
                self._tell_to_wait(member, self._members.why_waits(member))
            else:
                member.channel.send("start", share=asdict(member.share), heirs=self._heirs)
        return self.share

    def watch(self, listener: Listener) -> None:
        """From now on tell it what other nodes say."""
        self._news.watch(listener)

    def signalled(self, number: int) -> None:
        """Pass it on to the other nodes."""
        self._tell_workers("signal", number=number)

    def failed(self) -> None:
        """End the ranks of all nodes."""
        self._tell_workers("stop")

    def settle(self, report: Report) -> Verdict:
        """Wait until every node has said how it ended, decide, and tell them."""
        overdue = None
        if self._news.failed or report.failures:
            overdue = self._loop.later(self._plan.peer_grace + SILENT_S, self._give_up)
        self._loop.run(lambda: all(member.report for member in self._members.at_work))
        if overdue:
            overdue.cancel()
        if self._port:
            self._port.close()
        self._runs = False
        verdict = self._decide(report)
        self._over = not verdict.again
        for member in self._members.all:
            if member.share is not None or self._over:
                member.channel.send("verdict", verdict=verdict.to_json())
        return verdict

    def close(self) -> None:
        """Leave; the others are told that nobody is to take this place."""
        self._door.close()
        if self._call:
            self._call.cancel()
        if self._port:
            self._port.close()
        ended = Verdict(1, line=f"node 0 at {self._where} ended before this node had ranks")
        for member in self._members.all:
            if not self._over:
                member.channel.send("verdict", verdict=ended.to_json())
            member.channel.close()

    # --- who is there

    def _wait_for_enough(self) -> None:
        if self.share is not None and self._enough:
            return
        if self.share is not None:
            here = len(self._members.chosen) + 1
            self._say(
                f"{nodes(here)} of at least {self._least} left: waits up to {self._plan.rdzv_timeout:g} s at "
                f"{self._where} for more"
            )
        late = self._loop.later(self._plan.rdzv_timeout, self._too_few)
        self._wake()
        self._loop.run(lambda: self._enough and (self._full or self._silent))
        late.cancel()

    @property
    def _enough(self) -> bool:
        return len(self._members.chosen) + 1 >= self._least

    @property
    def _full(self) -> bool:
        return len(self._members.chosen) + 1 >= self._most_expected

    @property
    def _silent(self) -> bool:
        return time.monotonic() >= self._heard + self._plan.last_call

    def _wake(self) -> None:
        """Look again when nobody has come for as long as is waited for one more."""
        self._heard = time.monotonic()
        self._loop.later(self._plan.last_call, lambda: None)

    def _too_few(self) -> None:
        if self._enough:
            return
        raise LaunchError(
            f"only {nodes(len(self._members.chosen) + 1)} of at least {self._least} at {self._where} after "
            f"{self._plan.rdzv_timeout:.0f} s, where node 0 ({socket.gethostname()}, this one) listens",
            do="start the same command on more machines; --nnodes MIN:MAX and --rdzv-timeout say how many must come, "
            "and how soon",
        )

    def _hello(self, channel: Channel, message: Message) -> None:
        if message["kind"] == "moved":
            self._hear_of(message)
            channel.close()
            return
        reason = self._refusal(message)
        address = channel.address if not is_loopback(channel.address) else self._endpoint[0]
        slots = Slots(int(message["nproc"]), message["least_nproc"])
        member = Member(channel, str(message["host"]), slots, (address, int(message["port"])))
        if reason:
            channel.send("refused", reason=reason)
            channel.close()
            return
        self._members.all.append(member)
        channel.lost = lambda: self._member_lost(member)
        channel.got = lambda said: self._said(member, said)
        if self.share is None:
            channel.send(
                "waiting", why=f"node 0 waits for at least {self._least} and at most {nodes(self._plan.nodes)}"
            )
        else:
            channel.send("waiting", why=self._members.why_waits(member))
        self._wake()
        if self._call:
            self._call.cancel()
        self._call = self._loop.later(self._plan.last_call, self._let_in)

    def _hear_of(self, message: Message) -> None:
        host, port = message["endpoint"]
        if message["run_id"] == (self._plan.run_id or "") and self.share is None:
            raise MovedError((str(host), int(port)))

    def _tell_to_wait(self, member: Member, why: str) -> None:
        member.channel.send("waiting", why=why, heirs=self._heirs)

    @property
    def _heirs(self) -> list[tuple[str, int]]:
        return [member.heir for member in self._members.at_work]

    def _refusal(self, message: Message) -> str | None:
        run_id, theirs = message["run_id"], in_words(message["nodes"], message["least"])
        if run_id != (self._plan.run_id or ""):
            return f"another start listens here: its run id is {self._plan.run_id or ''!r}, not {run_id!r}"
        ours = in_words(self._plan.nodes, self._plan.least)
        return f"node 0 was started with --nnodes {ours}, not {theirs}" if theirs != ours else None

    def _let_in(self) -> None:
        """Nobody else has come for a while: ask the ranks to end, if there is somebody for whom there is a place."""
        self._call = None
        if not self._runs or self._asked or not self._newcomers:
            return
        self._asked = True
        self._tell_workers("change")
        self._news.change()

    @property
    def _newcomers(self) -> list[Member]:
        return [member for member in self._members.chosen if member.share is None]

    def _shares(self, chosen: list[Member]) -> list[Share]:
        assert self._port is not None
        folder, port = next_folder(self._log_dir), self._port.getsockname()[1]
        counts = [self._members.own.count, *(member.slots.count for member in chosen)]
        return [
            Share(
                restarts=self._judge.restarts, folder=folder, first_rank=sum(counts[:node]), nproc=count,
                world=sum(counts), node=node, nodes=len(counts), master_addr=self._endpoint[0], master_port=port,
                run_id=self._run_id,
            )
            for node, count in enumerate(counts)
        ]  # fmt: skip

    # --- what they say

    def _said(self, member: Member, message: Message) -> None:
        kind = message["kind"]
        try:
            if kind == "failed":
                self._stop_all()
            elif kind == "signal":
                self._tell_workers("signal", but=member, number=int(message["number"]))
                self._news.signal(int(message["number"]))
            elif kind == "ended":
                member.report = Report.from_json(message["report"])
        except (KeyError, TypeError, ValueError):
            self._member_lost(member)

    def _tell_workers(self, kind: str, but: Member | None = None, **values: int) -> None:
        for member in self._members.at_work:
            if member is not but:
                member.channel.send(kind, **values)

    def _member_lost(self, member: Member) -> None:
        member.lost = True
        if member.share is None:
            self._members.all.remove(member)
        if member.share is None or member.report is not None:
            return
        self._lost.append(
            Failure(
                host=f"node {member.share.node} of {member.share.nodes} on {member.host} is lost",
                code=1,
                what="its supervisor closed the connection, or the network did",
            )
        )
        member.report = Report()
        self._stop_all()

    def _give_up(self) -> None:
        for member in self._members.at_work:
            if member.report is None:
                member.channel.close()
                self._member_lost(member)

    def _stop_all(self) -> None:
        self.failed()
        self._news.failure()

    # --- what follows

    def _decide(self, report: Report) -> Verdict:
        working = self._members.at_work
        reports = [report, *(member.report for member in working if member.report)]
        self._members.own.recount(report)
        for member in working:
            if member.report:
                member.slots.recount(member.report)
        if self._lost:
            reports.append(Report(failures=tuple(self._lost)))
        return self._judge.decide(reports, self._remedy, self._change() if self._asked else None)

    def _change(self) -> str:
        hosts = ", ".join(member.host for member in self._newcomers)
        return f"{hosts} joined: going on with {self._members.words(self._members.chosen)}" if hosts else "going on"

    def _remedy(self, cause: Failure, /, *, further: bool) -> Remedy:
        if self._lost and cause in self._lost:
            return Remedy(self._then(), excused=True)
        if self._came and not further and self._undo(cause):
            return Remedy(self._then(), excused=True, free=True)
        slots = [self._members.own, *(member.slots for member in self._members.at_work)]
        found = Tally(self._plan.slot_retries, slots).remedy(cause, further=further)
        return found if found.dropped is not None else Remedy(self._then(), excused=bool(self._lost))

    def _undo(self, cause: Failure) -> bool:
        """Whether the world failed because of those who came: the next one is without them."""
        members = self._members
        counts = [members.own.count, *(member.slots.count for member in members.at_work)]
        node, _ = placed(cause.rank, counts)
        if cause.code == EXIT_USAGE:
            members.below, members.why = sum(counts), cause.what
            return True
        if node and (member := members.at_work[node - 1]) in self._came:
            member.unfit = f"its rank {cause.rank} failed before anything was committed: {cause.what}"
            return True
        return False

    def _then(self) -> str:
        return f" with {self._members.words(self._members.chosen)}" if self._enough else ""


def nodes(count: int) -> str:
    """A number of nodes in words."""
    return f"{count} node{'s' if count != 1 else ''}"
