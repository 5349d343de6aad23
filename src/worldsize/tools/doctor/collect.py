"""Room: the ranks that measure collectives, started on this host by `worldsize run`; what they found comes as a file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.launch import env, shell
from worldsize.launch.scratch import Scratch
from worldsize.runtime import network
from worldsize.runtime.network import join_endpoint
from worldsize.tools.doctor import wire

if TYPE_CHECKING:
    from pathlib import Path

RESULT = "WORLDSIZE_DOCTOR_RESULT"
SECONDS = "WORLDSIZE_DOCTOR_SECONDS"
_MARGIN_S = 5.0
_LINES = 3


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet: numbers only, so that no name has to be known.

    Attributes:
        node: this host's number; nodes: how many there are.
        address: of node 0; port: kept there.
        ranks: on this host.
        seconds: for each measurement.
    """

    node: int
    nodes: int
    address: str
    port: int
    ranks: int
    seconds: float


def collect(meeting: Meeting, own: str, limit: float) -> dict[str, Any]:
    """Start this host's ranks and wait for them; node 0 has the figures, the others {}.

    Raises:
        RuntimeError: they failed; the last lines that they said.
        LaunchError: they had not ended after `limit` seconds.
    """
    with Scratch("doctor") as scratch:
        result = scratch.path / "result.json"
        values = {name: value for name, value in env.read().items() if name != wire.ADDRESS}
        values |= {RESULT: str(result), SECONDS: str(meeting.seconds), "PYTHONUNBUFFERED": "1"}
        interface = network.interfaces().get(own)
        if meeting.nodes > 1 and interface:
            values.setdefault("GLOO_SOCKET_IFNAME", interface)
        done = shell.call(_command(meeting, limit), values, timeout=limit)
        if done.code:
            said = [line for line in done.err.splitlines() if line.strip()]
            raise RuntimeError(" / ".join(said[-_LINES:]) or f"exit code {done.code}")
        return read(result)


def _command(meeting: Meeting, limit: float) -> list[str]:
    several = ["--nnodes", str(meeting.nodes), "--node-rank", str(meeting.node)]
    several += ["--rdzv-endpoint", join_endpoint(meeting.address, meeting.port), "--one-console"]
    options = ["--nproc-per-node", str(meeting.ranks), "--rdzv-timeout", f"{max(limit - _MARGIN_S, 1):g}s"]
    options += several if meeting.nodes > 1 else []
    return [sys.executable, "-m", "worldsize", "run", *options, "-m", "worldsize.tools.doctor.ranks"]


def read(result: Path) -> dict[str, Any]:
    """The figures in a file; {} where this host's ranks left none."""
    if not result.exists():
        return {}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found
