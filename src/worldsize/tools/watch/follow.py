"""Room: what a run folder gains while one looks on: the end of its files first, then only what is new."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from worldsize.tools.report import reading

if TYPE_CHECKING:
    from pathlib import Path

_TAIL = 1 << 20
"""Bytes of a file's end that are read at first: hours of metrics."""
_KEPT = 4000


class Tail:
    """The last lines of a file that grows.

    Args:
        path: it may come later.
        whole: read all of it, and keep all.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path, self._whole = path, whole
        self._at: int | None = None
        self._rest = b""
        self.rows: deque[dict[str, Any]] = deque(maxlen=None if whole else _KEPT)

    def read(self) -> None:
        """Take over what is new."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if self._at is None or size < self._at:
                    self._at = 0 if self._whole else max(0, size - _TAIL)
                    self._rest = b""
                file.seek(self._at)
                new = file.read()
        except OSError:
            return
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut by a kill, or the first one of a tail
            if isinstance(row, dict):
                self.rows.append(row)


class Follow:
    """A run folder.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = [Tail(folder / f"{name}.jsonl", whole=name == "events") for name in reading.FILES]

    def look(self) -> reading.RunFacts:
        """How it stands now. Raises ConfigError where nothing has begun."""
        for file in self._files:
            file.read()
        metrics, times, events = (list(file.rows) for file in self._files)
        return reading.of(self._folder, metrics, times, events)
