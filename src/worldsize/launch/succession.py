"""Room: a node of a world whose nodes come and go, whoever is node 0: what becomes of it when node 0 is lost.

The others know each other's addresses, in the order of their nodes. The first of them that is left listens in node 0's
place, the rest look for it. Where node 0 comes back at its old endpoint it is told who took its place.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import ports
from worldsize.launch.elastic import Leader, MovedError
from worldsize.launch.guest import Guest
from worldsize.runtime.network import join_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.launch.loop import Loop
    from worldsize.launch.meeting import Listener
    from worldsize.launch.plan import Plan, Share
    from worldsize.launch.verdict import Report, Verdict

_FIND_S = 45.0
"""How long one that may have taken node 0's place is looked for: it may notice the loss that much later."""
_RETRY_S = 0.2
_HERALD_S = 3.0


class Changing:
    """One node of such a world.

    Args:
        loop: serves it.
        plan: says where and who.
        log_dir: where attempts are counted, should this be node 0.
        server: listens at the endpoint where this is node 0.
        say: tells a person what it waits for.
    """

    def __init__(
        self, loop: Loop, plan: Plan, log_dir: Path, server: socket.socket | None, say: Callable[[str], None]
    ) -> None:
        self._loop, self._plan, self._log_dir, self._say = loop, plan, log_dir, say
        self._kept = ports.reserve()
        self._herald: _Herald | None = None
        self._node = Leader(loop, plan, log_dir, server, say) if server else self._guest()

    def begin(self) -> Share | Verdict:
        """This node's place in the next attempt, under whoever is node 0 then.

        Raises:
            LaunchError: there is no node 0, too few nodes came, or this one is refused.
        """
        if isinstance(self._node, Guest) and self._node.abandoned:
            self._succeed(self._node)
        try:
            return self._node.begin()
        except MovedError as moved:
            self._node.close()
            self._say(f"another node took node 0's place meanwhile: joins at {join_endpoint(*moved.endpoint)}")
            self._node = self._guest(moved.endpoint)
        except LaunchError:
            if not (isinstance(self._node, Guest) and self._node.gone and self._node.heirs):
                raise
            self._succeed(self._node)
        return self.begin()

    def watch(self, listener: Listener) -> None:
        """From now on tell it what the other nodes say."""
        self._node.watch(listener)

    def signalled(self, number: int) -> None:
        """Tell the other nodes."""
        self._node.signalled(number)

    def failed(self) -> None:
        """Tell the other nodes."""
        self._node.failed()

    def settle(self, report: Report) -> Verdict:
        """Exchange how the attempt ended. The loss of node 0 is not the end."""
        node = self._node
        verdict = node.settle(report)
        self._recount(report, verdict)
        if not isinstance(node, Guest) or not node.abandoned or verdict.code == 0:
            return verdict
        if report.stopped is not None or self._plan.max_restarts == 0 or not node.heirs:
            return verdict
        where = join_endpoint(*node.heirs[0])
        return replace(
            verdict, again=True, line=f"{verdict.line} (starting again without it: the others meet at {where})"
        )

    def close(self) -> None:
        """Leave."""
        if self._herald:
            self._herald.close()
        self._node.close()
        self._kept.close()

    def _guest(self, endpoint: tuple[str, int] | None = None) -> Guest:
        plan = replace(self._plan, endpoint=endpoint or self._plan.endpoint, node=None)
        return Guest(self._loop, plan, self._say, heir=self._kept.getsockname()[1])

    def _recount(self, report: Report, verdict: Verdict) -> None:
        """Another node 0 is told as many ranks as there are now."""
        share, left = self._node.share, report.nproc or self._plan.nproc
        if share is not None and verdict.dropped is not None:
            left -= 0 <= verdict.dropped - share.first_rank < share.nproc
        self._plan = replace(self._plan, nproc=left)

    # --- node 0 is lost

    def _succeed(self, lost: Guest) -> None:
        """Find who took its place, or take it."""
        lost.close()
        if self._answers(lost.endpoint, 0):  # it was only the connection, or it has come back
            self._node = self._guest(lost.endpoint)
            return
        mine = lost.share.node - 1 if lost.share else None
        for number, endpoint in enumerate(lost.heirs):
            if number == mine and lost.share:
                self._lead(endpoint, lost.endpoint, lost.share)
                return
            if self._answers(endpoint, _FIND_S):
                self._node = self._guest(endpoint)
                return
        raise LaunchError(
            f"node 0 at {join_endpoint(*lost.endpoint)} is lost, and nobody has taken its place",
            found=f"looked for {', '.join(join_endpoint(*heir) for heir in lost.heirs)}",
            do="start it again: it goes on from the last commit",
        )

    def _lead(self, endpoint: tuple[str, int], old: tuple[str, int], before: Share) -> None:
        plan = replace(self._plan, endpoint=endpoint)
        where = join_endpoint(*endpoint)
        self._say(f"this node takes node 0's place; who joins from now on is to give --rdzv-endpoint {where}")
        self._kept.listen()
        self._node = Leader(self._loop, plan, self._log_dir, self._kept, self._say, before=before)
        self._herald = _Herald(self._loop, old, endpoint, self._plan)

    def _answers(self, endpoint: tuple[str, int], seconds: float) -> bool:
        """Whether somebody listens there within that time."""
        found: list[bool] = []

        def look() -> None:
            try:
                socket.create_connection(endpoint, timeout=1.0).close()
            except OSError:
                timers.append(self._loop.later(_RETRY_S, look))
            else:
                found.append(True)

        timers = [self._loop.later(0, look)]
        late = self._loop.later(max(seconds, _RETRY_S / 2), lambda: found.append(False))
        self._loop.run(lambda: bool(found))
        for timer in (*timers, late):
            timer.cancel()
        return found[0]


class _Herald:
    """Tells whoever listens at the old endpoint where the world is now, again and again."""

    def __init__(self, loop: Loop, old: tuple[str, int], new: tuple[str, int], plan: Plan) -> None:
        self._loop, self._old = loop, old
        self._socket: socket.socket | None = None
        self._line = json.dumps({"kind": "moved", "run_id": plan.run_id or "", "endpoint": new}).encode() + b"\n"
        self._pause = min(_HERALD_S, plan.last_call / 3)
        self._timer = loop.later(self._pause, self._knock)

    def close(self) -> None:
        """No more."""
        self._timer.cancel()
        self._drop()

    def _knock(self) -> None:
        self._drop()
        self._timer = self._loop.later(max(self._pause, 0.1), self._knock)
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._old, type=socket.SOCK_STREAM)[0]
        except OSError:
            return
        self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        if self._socket.connect_ex(address) in (0, errno.EINPROGRESS):
            self._loop.watch(self._socket.fileno(), self._tell, write=True)

    def _tell(self) -> None:
        assert self._socket is not None
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            os.write(self._socket.fileno(), self._line)
        self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
