"""Room: progress for people: a bar on a terminal, one plain line every so often in a file. Numbers come from outside."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST, _EVERY = 1.0, 10.0


class Progress(Protocol):
    """Shows how far a run is."""

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """A step was made; `values` are its numbers."""
        ...

    def say(self, line: str) -> None:
        """One line for a person, whatever else is on the screen."""
        ...

    def committed(self, line: str) -> None:
        """A checkpoint exists; shown where it is worth a line."""
        ...

    def close(self) -> None:
        """Leave the screen in order."""
        ...


class Silent:
    """Progress of every process but one."""

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def committed(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """For files and pipes: a first line soon, then one every ten seconds, commits likewise; no carriage returns.

    Args:
        first: step to begin at.
        total: steps of the whole run, or None where that is not known.
    """

    def __init__(self, first: int, total: int | None) -> None:
        self._total, self._next, self._next_commit = total, time.monotonic() + _FIRST, 0.0
        self._began = (first, time.monotonic())

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Print where the time has come."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        first, since = self._began
        speed = (step + 1 - first) / (now - since)
        of = f"/{self._total}" if self._total is not None else ""
        self.say(f"step {step + 1}{of}  {words(values)}  {speed:.3g} steps/s")

    def say(self, line: str) -> None:
        """Print, at once, and in one write: the threads that save and track speak too."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def committed(self, line: str) -> None:
        """Print, unless another commit was printed a moment ago: a run may save every step."""
        now = time.monotonic()
        if now >= self._next_commit:
            self._next_commit = now + _EVERY
            self.say(line)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """For a terminal.

    Args:
        first: step to begin at.
        total: steps of the whole run, or None where that is not known.
    """

    def __init__(self, first: int, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns: tuple[Any, ...] = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = RichProgress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._task = self._progress.add_task("", total=total, completed=first)
        self._progress.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step + 1, description=words(values))

    def say(self, line: str) -> None:
        """Print above the bar."""
        self._progress.console.print(line, highlight=False, markup=False)

    def committed(self, line: str) -> None:
        """Nothing: a person who looks on wants the bar."""

    def close(self) -> None:
        """Give the terminal back."""
        self._progress.stop()


def choose(first: int, total: int | None) -> Progress:
    """A bar where a person looks on, lines where a file does."""
    return Bar(first, total) if sys.stderr.isatty() else Lines(first, total)


def words(values: Mapping[str, float]) -> str:
    """Numbers in four digits."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items() if name not in ("epoch", "samples"))
