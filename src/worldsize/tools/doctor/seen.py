"""Room: everything that was measured, as the judges read it. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldsize.tools.doctor.disk import Written
    from worldsize.tools.doctor.facts import Facts


@dataclass(frozen=True, slots=True)
class Link:
    """A stream between two hosts: bytes/s there and back, seconds of the shortest round trip."""

    one: str
    other: str
    there: float
    back: float
    trip: float

    @property
    def rate(self) -> float:
        """The slower direction."""
        return min(self.there, self.back)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What hosts saw of a folder.

    Attributes:
        path: the folder.
        unseen: host -> the hosts whose files it did not see in time.
        slowest: host -> seconds until it had seen all that it saw.
        stale: hosts that still read the old file by its name, in time.
        broken: host -> what became of a file that was open there when another was renamed over it.
        twice: files that two hosts created exclusively, or none.
        limit: what "in time" means, in seconds.
    """

    path: str
    unseen: dict[str, list[str]] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    limit: float = 5.0


@dataclass(slots=True, kw_only=True)
class Seen:
    """All of it; what could not be measured is absent.

    Attributes:
        asked: the hosts that were to be looked at.
        lost: those that were not there, or not to the end, and why.
        failed: (host, question) -> why there was no answer.
        slurm: names of nodes are what a job's ranks meet by.
        names: host -> name -> its addresses there; None: no answer.
        closed: (from, to, port, why) that could not be dialled; dialled: how many were tried.
        clocks: host -> seconds ahead of this one's, and how sure.
        links: streams between pairs; every_pair: whether there was time for all of them.
        disks: host -> kind of place -> what it gave.
        collectives: what `ranks` found, with the order of the hosts; `silent` is why there is nothing.
    """

    asked: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    slurm: bool = False
    facts: dict[str, Facts] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    names: dict[str, dict[str, list[str] | None]] = field(default_factory=dict)
    closed: list[tuple[str, str, int, str]] = field(default_factory=list)
    dialled: int = 0
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    every_pair: bool = True
    disks: dict[str, dict[str, Written]] = field(default_factory=dict)
    shared: Shared | None = None
    shared_asked: bool = False
    collectives: dict[str, Any] | None = None
    order: list[str] = field(default_factory=list)
    silent: str = ""
