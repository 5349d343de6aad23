"""Room: what the doctor and its agents say to each other: a JSON value a line, over one connection that a word opens."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from worldsize.runtime.network import join_endpoint, split_endpoint

ADDRESS = "WORLDSIZE_DOCTOR"
"""The variable that tells an agent where the doctor is, and the word that opens its door."""
_LONGEST = 1 << 24
_TRY_S = 3.0


@dataclass(frozen=True, slots=True)
class Door:
    """Where the doctor listens: one port, at any of its host's addresses; the word keeps others out."""

    word: str
    addresses: tuple[str, ...]
    port: int

    @property
    def text(self) -> str:
        """As a variable."""
        return f"{self.word}@{','.join(join_endpoint(address, self.port) for address in self.addresses)}"

    @classmethod
    def of(cls, text: str) -> Door:
        """The inverse of `text`."""
        word, _, rest = text.partition("@")
        places = [split_endpoint(place) for place in rest.split(",")]
        return cls(word, tuple(host for host, _ in places), places[0][1])


class Line:
    """One side of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._reader = connection.makefile("rb")

    def send(self, value: Any) -> None:
        """One value. Raises OSError where nobody is there."""
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, limit: float | None) -> Any:
        """The next value.

        Raises:
            TimeoutError: none came in `limit` seconds; the line cannot be used any more.
            EOFError: the other side is gone, or speaks something else.
        """
        self.socket.settimeout(limit)
        text = self._reader.readline(_LONGEST)
        if not text.endswith(b"\n"):
            raise EOFError("the connection has ended")
        return json.loads(text)

    def close(self) -> None:
        """End it, for whoever waits for it too."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self.socket.close()


def connect(door: Door) -> Line | None:
    """The line to the doctor, through the first of its addresses that answers; None: none of them does."""
    for address in door.addresses:
        try:
            connection = socket.create_connection((address, door.port), timeout=_TRY_S)
        except OSError:
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Line(connection)
    return None
