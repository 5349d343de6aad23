"""Room: what the loop writes for whoever watches it from another thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Pulse:
    """Where the loop is.

    Attributes:
        step: the last step that was begun.
        beat: moves on with what takes long inside of a step, such as an evaluation.
    """

    step: int = -1
    beat: int = 0


class Watched(Protocol):
    """Who watches."""

    def close(self) -> None:
        """Watch no more."""
        ...


class Unwatched:
    """Nobody watches."""

    def close(self) -> None:
        """Nothing."""
