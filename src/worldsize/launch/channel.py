"""Room: how supervisors of several nodes talk: messages over one connection, and the door at which they come in.

One JSON object a line, each with a "kind". Nothing received is executed; a stranger's connection is dropped.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.launch.loop import Loop
    from worldsize.launch.meeting import Listener

_LONGEST_LINE = 1 << 22
_SEND_TIMEOUT_S = 10.0
SILENT_S = 10.0
"""How much longer than its ranks' grace a supervisor may stay silent after a failure."""

Message = dict[str, Any]


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

    @property
    def address(self) -> str:
        """Of the other side."""
        try:
            return str(self._connection.getpeername()[0]).removeprefix("::ffff:")
        except OSError:
            return ""

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


class Door:
    """Where supervisors come in.

    Args:
        loop: serves it.
        server: it listens.
        hello: called with whoever says hello first, and what it said.
    """

    def __init__(self, loop: Loop, server: socket.socket, hello: Callable[[Channel, Message], None]) -> None:
        self._loop, self._server, self._hello = loop, server, hello
        self._strangers: set[Channel] = set()
        server.settimeout(0)
        loop.watch(server.fileno(), self._accept)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._loop.unwatch(self._server.fileno())
        self._server.close()
        for channel in self._strangers:
            channel.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        channel = Channel(self._loop, connection)
        self._strangers.add(channel)
        channel.lost = lambda: self._strangers.discard(channel)
        channel.got = lambda message: self._first(channel, message)

    def _first(self, channel: Channel, message: Message) -> None:
        self._strangers.discard(channel)
        try:
            self._hello(channel, message)
        except (KeyError, TypeError, ValueError):
            channel.close()


class News:
    """What other nodes say of the attempt, kept until somebody listens."""

    def __init__(self) -> None:
        self.failed = self._changes = False
        self._numbers: list[int] = []
        self._listener: Listener | None = None

    def watch(self, listener: Listener) -> None:
        """From now on tell it; at once, what was said already."""
        self._listener = listener
        for number in self._numbers:
            listener.signal_elsewhere(number)
        if self._changes:
            listener.give_way()
        if self.failed:
            listener.end()

    def failure(self) -> None:
        """Another node has failed."""
        self.failed = True
        if self._listener:
            self._listener.end()

    def signal(self, number: int) -> None:
        """Another node was sent a signal."""
        self._numbers.append(number)
        if self._listener:
            self._listener.signal_elsewhere(number)

    def change(self) -> None:
        """Another node joins: this attempt is to end, with everything committed."""
        self._changes = True
        if self._listener:
            self._listener.give_way()

    def forget(self) -> None:
        """A new attempt begins."""
        self.failed, self._changes, self._numbers, self._listener = False, False, [], None


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
