"""Room: one host's side of the network: who can be dialled, what a name means here, how fast a stream of bytes is."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from worldsize.launch import ports
from worldsize.runtime import network

_CHUNK = 1 << 20
_WORD = 64
_SERVE_S = 60.0
_PINGS = 50


class Meter:
    """Answers pings and sends bytes to whoever knows the word, until this process ends."""

    def __init__(self, word: str) -> None:
        self._word = word.encode().ljust(_WORD)
        self._server = socket.create_server(("", 0)) if not socket.has_dualstack_ipv6() else _dual()
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with suppress(OSError):
                threading.Thread(target=self._serve, args=(self._server.accept()[0],), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with closing(line), suppress(OSError):
            line.settimeout(_SERVE_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(_whole(line, _WORD), self._word):
                return
            while kind := line.recv(1):
                if kind == b"p":
                    line.sendall(kind)
                else:
                    _pour(line)


def measure(address: str, port: int, word: str, seconds: float) -> tuple[float, float]:
    """Bytes/s that come from another host's meter, and the shortest round trip to it in seconds.

    Raises:
        OSError: it cannot be reached, or stops in the middle.
    """
    with socket.create_connection((address, port), timeout=5.0) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(seconds + 10.0)
        line.sendall(word.encode().ljust(_WORD))
        trip = min(_ping(line) for _ in range(_PINGS))
        line.sendall(b"s")
        return _drained(line, seconds), trip


def listen(wanted: list[int]) -> dict[int, socket.socket]:
    """Listening sockets on those of these ports that are free."""
    found = {}
    for port in wanted:
        with suppress(Exception):
            server = ports.reserve(port)
            server.listen(16)
            found[port] = server
    return found


def dial(targets: list[tuple[str, str, int]], limit: float) -> list[tuple[str, int, str]]:
    """Of these (host, address, port) the ones that cannot be reached: host, port, why."""
    with ThreadPoolExecutor(min(64, len(targets) or 1)) as pool:
        whys = pool.map(lambda target: _refusal(target[1], target[2], limit), targets)
        return [(host, port, why) for (host, _, port), why in zip(targets, whys, strict=True) if why]


def resolve(names: list[str], limit: float) -> dict[str, list[str] | None]:
    """Name -> its addresses here; None: no answer in `limit` seconds."""
    found: dict[str, list[str] | None] = dict.fromkeys(names)

    def ask(name: str) -> None:
        found[name] = sorted(set(network.addresses(name)))

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def own_address(towards: str) -> str:
    """Where others reach this host: the address from which it reaches another one, unless that is loopback."""
    return towards if not network.is_loopback(towards) else network.outward_address() or towards


def _dual() -> socket.socket:
    return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)


def _refusal(address: str, port: int, limit: float) -> str:
    try:
        socket.create_connection((address, port), timeout=limit).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _ping(line: socket.socket) -> float:
    began = time.perf_counter()
    line.sendall(b"p")
    if not line.recv(1):
        raise ConnectionError("it hung up")
    return time.perf_counter() - began


def _pour(line: socket.socket) -> None:
    """Until the other side has enough."""
    block = bytes(_CHUNK)
    end = time.monotonic() + _SERVE_S
    while time.monotonic() < end:
        line.sendall(block)


def _drained(line: socket.socket, seconds: float) -> float:
    """Bytes/s from the first byte on: what the sender's buffers still hold when the time is over does not count."""
    buffer, total = bytearray(_CHUNK), 0
    if not line.recv_into(buffer):
        raise ConnectionError("it hung up")
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < seconds or not total:
        count = line.recv_into(buffer)
        if not count:
            raise ConnectionError("it hung up")
        total += count
    return total / max(took, time.perf_counter() - began)


def _whole(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := line.recv(count - len(data))):
        data += more
    return data
