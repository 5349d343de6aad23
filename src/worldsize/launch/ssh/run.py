"""Room: one start over several hosts: all made ready before any begins, one console, one exit code, one end for all.

Each host runs our supervisor, and these meet as always; so who failed first is decided by them. Here is what they cannot
do: start each other, tell signals to all, and find out that a connection broke.
"""

from __future__ import annotations

import secrets
import signal
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_FAILED, NotStartedError
from worldsize.launch import env
from worldsize.launch.logs import ERR, Terminal
from worldsize.launch.loop import Loop
from worldsize.launch.shell import Group
from worldsize.launch.ssh import wire
from worldsize.launch.ssh.peer import Peer
from worldsize.launch.ssh.remote import LOST
from worldsize.launch.supervisor import FORWARDED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worldsize.launch.ssh.hosts import Host
    from worldsize.launch.ssh.remote import Way

_SETTLE_S = 15.0
"""After the first host has ended badly: to hear from the supervisors of the others, which know it too."""
_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """What is started, and where.

    Attributes:
        hosts: in the order of their nodes.
        way: how they are reached.
        words: the command line of `worldsize run` on each, without what differs between them.
        ranks: how many, where a host does not say it: as --nproc-per-node takes it.
        env: variables that go over.
        address: where node 0 is reached, port: on which port; None: node 0 finds out.
        grace: seconds from a stop to SIGKILL.
        limit: seconds until all hosts must be ready.
    """

    hosts: tuple[Host, ...]
    way: Way
    words: tuple[str, ...]
    ranks: str = "1"
    env: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    port: int | None = None
    grace: float = 30.0
    limit: float = 600.0


def run(start: Start) -> int:
    """Start it, and return the exit code of the whole, which is that of node 0's supervisor.

    Raises:
        NotStartedError: a host is not as it must be. Nothing has begun on any.
    """
    loop = Loop()
    console = Terminal(loop)
    try:
        with closing(_Starter(loop, console, start)) as starter:
            return starter.run()
    finally:
        console.flush()
        loop.close()


class _Starter:
    def __init__(self, loop: Loop, console: Terminal, start: Start) -> None:
        self._loop, self._console, self._start = loop, console, start
        self._group = Group()
        mark = secrets.token_hex(8)
        self._peers = [
            Peer(loop, console, start.way, name=host.name, mark=mark, changed=self._changed) for host in start.hosts
        ]
        self._begun: list[Peer] = []
        self._going = self._ending = False
        self._late = False
        self._stopped: int | None = None

    def run(self) -> int:
        """From start to exit code."""
        with self._loop.signals(FORWARDED, self._signal):
            self._make_ready()
            if self._stopped is not None:
                self._say(f"stopped by {signal.Signals(self._stopped).name} while no rank was running")
                return 128 + self._stopped
            self._go()
            self._loop.run(lambda: all(peer.code is not None for peer in self._peers))
        return self._code()

    def close(self) -> None:
        """End the commands; what they started on the hosts sees it."""
        self._group.close()
        for peer in self._begun:
            peer.close()

    def _make_ready(self) -> None:
        run_id, environ = secrets.token_hex(8), self._start.way.env(env.read())
        for node, (peer, host) in enumerate(zip(self._peers, self._start.hosts, strict=True)):
            peer.start(self._group, environ, self._job(node, host, run_id))
            self._begun.append(peer)
        late = self._loop.later(self._start.limit, self._too_late)
        self._loop.run(lambda: self._stopped is not None or all(peer.ready for peer in self._peers))
        late.cancel()

    def _job(self, node: int, host: Host, run_id: str) -> wire.Job:
        start, count = self._start, len(self._start.hosts)
        ranks = start.ranks if host.slots is None else str(len(host.slots))
        several = (
            "--nnodes",
            str(count),
            "--node-rank",
            str(node),
            "--one-console",
            "--rdzv-endpoint",
            "127.0.0.1:1",
        )
        words = ("--nproc-per-node", ranks, "--rdzv-id", run_id, *(several if count > 1 else ()), *start.words)
        slots = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots or ()))} if host.chosen else {}
        return wire.Job(words, {**start.env, **slots}, node, start.address, start.port, beats=start.way.feeds)

    def _go(self) -> None:
        first = self._peers[0].ready
        assert first is not None
        self._going = True
        for peer in self._peers:
            peer.release()
            peer.tell(wire.to_host("go", address=first["address"], port=first["port"]))
        if self._start.way.feeds:
            self._beat()

    def _beat(self) -> None:
        for peer in self._peers:
            if peer.code is None:
                peer.tell(b"\n")
        self._loop.later(wire.BEAT_S, self._beat)

    def _changed(self, peer: Peer) -> None:
        if not self._going:
            self._check(peer)
        elif peer.code is not None:
            if peer.code == LOST:
                self._say(f"host {peer.name} (node {self._peers.index(peer)}): the connection was lost")
            if not self._ending and (peer.code or peer is self._peers[0]):
                self._ending = True
                self._loop.later(_SETTLE_S, self._end)

    def _check(self, peer: Peer) -> None:
        from worldsize import __version__

        if peer.code is not None:
            raise peer.error
        if peer.ready and peer.ready["version"] != __version__:
            raise NotStartedError(
                f"host {peer.name} has another worldsize",
                found=f"{peer.ready['version']} there, {__version__} here",
                do="install the same version on all hosts",
            )

    def _too_late(self) -> None:
        missing = [peer.name for peer in self._peers if not peer.ready]
        raise NotStartedError(
            f"not all hosts were ready within {self._start.limit:.0f} s",
            found=f"missing: {', '.join(missing)}",
            do="see whether the working folder or the environment hangs there; --rdzv-timeout sets how long to wait",
        )

    def _signal(self, number: int) -> None:
        if not self._going:
            self._stopped = number
        for peer in self._peers if self._going else ():
            peer.tell(wire.to_host("signal", number=number))

    def _end(self) -> None:
        """One has ended, and the others know it or never will: nobody stays."""
        self._signal(signal.SIGTERM)
        self._loop.later(self._start.grace + _MARGIN_S, self._group.kill)

    def _code(self) -> int:
        codes = [peer.code or 0 for peer in self._peers]
        if codes[0] == LOST:
            return next((code for code in codes if code not in (0, LOST)), EXIT_FAILED)
        return codes[0] or (EXIT_FAILED if LOST in codes else next((code for code in codes if code), 0))

    def _say(self, line: str) -> None:
        self._console.write(ERR, f"worldsize: {line}\n".encode())
