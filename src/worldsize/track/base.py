"""Room: what a tracker is, and the one that does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tracker(Protocol):
    """Receives every number and event of a run, across its attempts."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers that belong to one step; the same step may come again after a resume, and the later one holds."""
        ...

    def event(self, kind: str, **facts: Any) -> None:
        """Something that happened: start, resume, save, stop, failure, end."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Nothing:
    """The tracker of every process but one."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def event(self, kind: str, **facts: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
