"""Room: the doctor's side: the door that agents come through, questions to all of them at once, who was lost and why."""

from __future__ import annotations

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from worldsize.runtime import network
from worldsize.tools.doctor.wire import Door, Line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_POLL_S = 0.1
_HELLO_S = 5.0
_SETTLE_S = 5.0
_AT_ONCE = 1024
"""Hosts that are asked at the same time: a thread each, made when it is needed."""


class RefusedError(Exception):
    """An agent could not do what it was asked; what it said."""


@dataclass(slots=True)
class Host:
    """A host whose agent has come: how others reach it, and its meter's port."""

    name: str
    address: str
    meter: int
    line: Line

    def ask(self, what: str, patience: float, /, **arguments: Any) -> Any:
        """One question, answered within `patience` seconds and a moment.

        Raises:
            RefusedError: it failed there.
            OSError, EOFError: the host is lost.
        """
        self.line.send({"do": what, "with": arguments})
        answer = self.line.receive(patience + _SETTLE_S)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["value"]


class Hub:
    """Agents, by the name of their host.

    Attributes:
        hosts: those that answer.
        lost: those that do not (any more), and why.
        failed: (host, question) -> why it had no answer.
    """

    def __init__(self, *, here: bool) -> None:
        self._server = socket.create_server(("", 0)) if not socket.has_dualstack_ipv6() else _dual()
        addresses = ("127.0.0.1",) if here else (*network.interfaces(), "127.0.0.1")
        self.door = Door(secrets.token_hex(16), addresses, int(self._server.getsockname()[1]))
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self.hosts: dict[str, Host] = {}
        self.lost: dict[str, str] = {}
        self.failed: dict[tuple[str, str], str] = {}

    def gather(self, expected: Callable[[], int], limit: float, late: float) -> None:
        """Let agents in, until all are there that still can come, or it takes too long.

        Args:
            expected: how many have come or can come.
            limit: seconds for the first.
            late: seconds that the others may come later than the first.
        """
        end = time.monotonic() + limit
        self._server.settimeout(_POLL_S)
        while time.monotonic() < end:
            all_here = expected() <= len(self.hosts)
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                if all_here:
                    return
                continue
            if self._let_in(connection) and len(self.hosts) == 1:
                end = min(end, time.monotonic() + late)

    def sort(self, key: Callable[[str], Any]) -> None:
        """Take the hosts in another order than that in which they came."""
        self.hosts = {name: self.hosts[name] for name in sorted(self.hosts, key=key)}

    def _let_in(self, connection: socket.socket) -> bool:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(connection)
        try:
            said = line.receive(_HELLO_S)
            known = secrets.compare_digest(str(said["word"]), self.door.word)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            line.close()
            return False
        self.hosts[said["name"]] = Host(said["name"], said["address"], said["meter"], line)
        return True

    def each(
        self, what: str, patience: float, arguments: Mapping[str, Mapping[str, Any]] | None = None, /, **same: Any
    ) -> dict[str, Any]:
        """Ask many at once: those that `arguments` names, or all. Who has no answer is missing in the result."""
        asked = [name for name in (self.hosts if arguments is None else arguments) if name in self.hosts]
        own = arguments or {}
        calls = {
            name: self._pool.submit(self._ask, name, what, patience, {**same, **own.get(name, {})}) for name in asked
        }
        answers = {name: call.result() for name, call in calls.items()}
        return {name: found[0] for name, found in answers.items() if found}

    def _ask(self, name: str, what: str, patience: float, arguments: Mapping[str, Any]) -> list[Any]:
        """The answer in a list; an empty one where there is none."""
        try:
            return [self.hosts[name].ask(what, patience, **arguments)]
        except RefusedError as error:
            self.failed[name, what] = str(error)
        except (OSError, EOFError) as error:
            why = f"no answer to {what!r} in {patience:.0f} s" if isinstance(error, TimeoutError) else str(error)
            self.lost[name] = why
            self.hosts.pop(name).line.close()
        return []

    def offset(self, name: str, times: int) -> tuple[float, float] | None:
        """How far a host's clock is ahead of this one's and how sure that is, in seconds: see `estimate`."""
        samples = []
        for _ in range(times):
            before = time.time()
            found = self._ask(name, "clock", _SETTLE_S, {})
            if not found:
                return None
            samples.append((before, float(found[0]), time.time()))
        return estimate(samples)

    def close(self) -> None:
        """The agents end when their lines do."""
        self._server.close()
        for host in list(self.hosts.values()):
            host.line.close()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def estimate(samples: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Offset and its bound from (sent, there, received): those of the quickest exchange, as NTP does.

    The offset is off by half of that one's round trip at most, however unevenly the ways there and back take.
    """
    sent, there, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return there - (sent + received) / 2, (received - sent) / 2


def _dual() -> socket.socket:
    return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
