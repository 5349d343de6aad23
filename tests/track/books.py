"""Room: libraries for tests of what stands between a training and a library: one that is well, and others."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, ClassVar

from worldsize.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.track.base import Row, Status, Training


class Book:
    """Keeps what it is told in memory, under the run's folder, across attempts; only appends."""

    rewinds = False
    kept: ClassVar[dict[str, list[Row]]] = {}
    ends: ClassVar[dict[str, list[tuple[Status, str]]]] = {}
    opened: ClassVar[list[Training]] = []
    threads: ClassVar[set[str]] = set()

    def __init__(self, training: Training, *, title: str = "untitled") -> None:
        self.opened.append(training)
        self._rows = self.kept.setdefault(training.id, [])
        self._ends = self.ends.setdefault(training.id, [])
        self.through = self._rows[-1].step + 1 if self._rows else 0
        self.ids: Mapping[str, str] = {"title": title}

    def log(self, rows: Sequence[Row]) -> None:
        """Remember them."""
        self.threads.add(threading.current_thread().name)
        self._rows += rows

    def close(self, status: Status, words: str) -> None:
        """Remember how it ended."""
        self._ends.append((status, words))


class Slow(Book):
    """Takes half a second for whatever it is given."""

    calls: ClassVar[list[tuple[float, float]]] = []

    def log(self, rows: Sequence[Row]) -> None:
        """In its own time."""
        began = time.monotonic()
        time.sleep(0.5)
        self.calls.append((began, time.monotonic()))
        super().log(rows)


class Stuck(Book):
    """Never comes back."""

    def log(self, rows: Sequence[Row]) -> None:
        """For as long as a test lasts."""
        del rows
        time.sleep(600)


class Broken(Book):
    """Opens, and then fails at the first rows of each attempt."""

    failures: ClassVar[int] = 0

    def log(self, rows: Sequence[Row]) -> None:
        """Once in vain."""
        if not Broken.failures:
            Broken.failures += 1
            raise ConnectionError("the line\nis dead")
        super().log(rows)


class Closed(Book):
    """Cannot be opened."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        raise PermissionError("no entry")


class Absent(Book):
    """Is not installed."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        raise MissingExtraError.of("absent", "mlflow")
