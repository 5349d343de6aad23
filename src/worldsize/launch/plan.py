"""Room: what is to be started here, and the place a node is given for one attempt. Values only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Read "30", "1.5s", "500ms", "2m" or "1h" as seconds. Raises ConfigError on anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|)\s*", text, re.ASCII)
    if not found:
        raise ConfigError(f"{text!r} is not a length of time", do="write 30s, 500ms, 2m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def in_words(nodes: int, least: int | None) -> str:
    """As --nnodes takes it."""
    return str(nodes) if least is None else f"{least}:{nodes}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one supervisor starts on its node, and how it treats it."""

    argv: tuple[str, ...]
    """The program of every rank."""
    nproc: int = 1
    """Ranks on this node."""
    least_nproc: int | None = None
    """The fewest ranks with which this node goes on, where a slot is bad or a GPU gone; None: all of them."""
    slot_retries: int = 1
    """How often a slot whose rank failed is tried again without a new commit, before it is left out."""
    nodes: int = 1
    """Nodes; where their number may change, the most."""
    least: int | None = None
    """The fewest nodes that begin and go on; None: their number does not change."""
    last_call: float = 30.0
    """Seconds for which a number of nodes that may grow waits for one more."""
    node: int | None = None
    """This node's number; None: in the order of arrival, the host of the endpoint first."""
    endpoint: tuple[str, int] | None = None
    """Where the supervisors of several nodes meet; served by node 0."""
    master_port: int | None = None
    """The port of rank 0's store on a single node; None: a free one."""
    run_id: str | None = None
    """The name of this start, equal on all nodes; None: a random one."""
    role: str = "default"
    max_restarts: int = 0
    restart_delay: float = 0.0
    spare: bool = True
    """Keep an interpreter ready for the next attempt, where there may be one."""
    grace: float = 30.0
    """Seconds between a stop signal and SIGKILL."""
    peer_grace: float = 5.0
    """Seconds between the failure of one rank and SIGKILL for the others, at most; see `Attempt.end`."""
    rdzv_timeout: float = 600.0
    log_dir: Path | None = None
    """Where `attempts/<n>/rank-<k>.log` are kept; None: a temporary folder, removed after success."""
    one_console: bool = False
    """All nodes write to one console: only node 0 says there how it ended."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further variables for the ranks."""

    @property
    def changes(self) -> bool:
        """Whether the number of nodes may change while it runs."""
        return self.least is not None


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of one node in one attempt."""

    restarts: int
    """How often the ranks have been started before in this run of the supervisor."""
    folder: int
    """The number under `attempts/`: counts on where the log folder has been used before."""
    first_rank: int
    nproc: int
    world: int
    node: int
    nodes: int
    master_addr: str
    master_port: int
    run_id: str
