"""Room: what a tracker is, the one that does nothing, several as one; and what a library's file must offer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Status = Literal["finished", "stopped", "failed"]
"""How an attempt ended: all steps made; asked to stop, to be started again; with an exception."""


class Tracker(Protocol):
    """Receives every number and event of a run, across its attempts."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers that belong to one step; the same step may come again after a resume, and the later one holds."""
        ...

    def event(self, kind: str, /, **facts: Any) -> None:
        """Something that happened: start, resume, save, stop, failure, end."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Nothing:
    """The tracker of every process but one."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def event(self, kind: str, /, **facts: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Several:
    """Gives all to each, in their order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """To each."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def event(self, kind: str, /, **facts: Any) -> None:
        """To each."""
        for tracker in self._trackers:
            tracker.event(kind, **facts)

    def close(self) -> None:
        """Each."""
        for tracker in self._trackers:
            tracker.close()


@dataclass(frozen=True, slots=True)
class Row:
    """The numbers of one step, and when they were logged: seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Training:
    """What a library is told about the run.

    Attributes:
        folder: the run folder; its name is the run's.
        id: the run's own, one for all attempts.
        attempt: this one's number, from 0.
        step: the first step that this attempt makes: numbers of earlier attempts from there on do not hold.
        config: settings by name: plain values.
        environment: versions, hosts, devices, code: plain values.
        ended: how each earlier attempt ended, in words.
        ids: what the library's file said in `ids` before; empty at first.
    """

    folder: Path
    id: str
    attempt: int
    step: int
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    ended: Sequence[str] = ()
    ids: Mapping[str, str] = field(default_factory=dict)


class Library(Protocol):
    """One library's place for a run, opened by the class itself: `Class(training, **options)`.

    All calls come from one thread of one process, and an exception from any of them harms no training. Rows come once
    each, with growing steps; the first one's is `through`, so that what an earlier attempt could not bring comes now.
    """

    rewinds: ClassVar[bool]
    """Whether numbers can be taken back at opening. If not, they come when their step is committed and stays."""
    through: int
    """Numbers of steps below this are there already, and none of later ones."""
    ids: Mapping[str, str]
    """What the next attempt must know to go on in the same place; kept in run.json."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take these, and have them written when it returns."""
        ...

    def close(self, status: Status, words: str) -> None:
        """The attempt is over; `words` say how."""
        ...
