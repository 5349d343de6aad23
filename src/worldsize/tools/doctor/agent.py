"""Room: our process on one host: does what the doctor asks, one thing after another, and ends with the connection."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.launch import env, ports
from worldsize.tools.doctor import collect, disk, facts, net, share, wire

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE_S = 60.0
_SILENT_S = 600.0


class Agent:
    """What can be asked of a host. Arguments and results are plain values."""

    def __init__(self, word: str, address: str) -> None:
        self._word = word
        self._meter = net.Meter(word)
        self._listening: dict[int, socket.socket] = {}
        self._kept: socket.socket | None = None
        self.address = address

    def facts(self) -> dict[str, Any]:
        """See `Facts`."""
        return asdict(facts.take())

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def resolve(self, names: list[str], limit: float) -> dict[str, list[str] | None]:
        """See `net.resolve`."""
        return net.resolve(names, limit)

    def listen(self, wanted: list[int]) -> list[int]:
        """The ports on which it listens now; those of before are given back."""
        for server in self._listening.values():
            server.close()
        self._listening = net.listen(wanted)
        return list(self._listening)

    def dial(self, targets: list[tuple[str, str, int]], limit: float) -> list[tuple[str, int, str]]:
        """See `net.dial`."""
        return net.dial(targets, limit)

    def measure(self, address: str, port: int, seconds: float) -> tuple[float, float]:
        """See `net.measure`."""
        return net.measure(address, port, self._word, seconds)

    def write(self, path: str, mebibytes: int, limit: float) -> dict[str, Any]:
        """See `disk.write`."""
        return asdict(disk.write(Path(path), mebibytes, limit))

    def temporary(self) -> str:
        """The folder for temporary files, usable or not."""
        return env.read().get("TMPDIR") or "/tmp"  # noqa: S108 - what is measured is this place

    def port(self) -> int:
        """A port that is kept until the collectives begin."""
        self._kept = ports.reserve()
        return int(self._kept.getsockname()[1])

    def collect(self, meeting: dict[str, Any], limit: float) -> dict[str, Any]:
        """See `collect.collect`."""
        return collect.collect(collect.Meeting(**meeting), self.address, limit)

    def hello(self, name: str) -> dict[str, Any]:
        """What it says first."""
        return {"word": self._word, "name": name, "address": self.address, "meter": self._meter.port}


_SHARE: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (share.begin, share.end, share.put, share.look, share.hold, share.held, share.claim)
}


def main(name: str | None = None) -> None:
    """Serve the doctor to its end."""
    environ = env.read()
    door = wire.Door.of(environ[wire.ADDRESS])
    line = _reached(door)
    if line is None:
        where = ", ".join(door.addresses)
        sys.exit(f"worldsize: {socket.gethostname()} cannot reach the doctor at {where}, port {door.port}")
    agent = Agent(door.word, net.own_address(line.socket.getsockname()[0].removeprefix("::ffff:")))
    with suppress(OSError, EOFError):
        line.send(agent.hello(name or environ.get("SLURMD_NODENAME") or socket.gethostname()))
        while True:
            asked = line.receive(_SILENT_S)
            line.send(_answer(agent, asked["do"], asked["with"]))


def _reached(door: wire.Door) -> wire.Line | None:
    end = time.monotonic() + _PATIENCE_S
    while (line := wire.connect(door)) is None and time.monotonic() < end:
        time.sleep(0.5)
    return line


def _answer(agent: Agent, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
    ask = _SHARE[what.partition(".")[2]] if what.startswith("share.") else getattr(agent, what)
    try:
        return {"value": ask(**arguments)}
    except Exception as error:  # noqa: BLE001 - it is told to the doctor, who says which host it was
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:2])
