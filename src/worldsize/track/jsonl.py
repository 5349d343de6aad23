"""Room: metrics.jsonl and events.jsonl of a run folder: one JSON object a line, appended, never rewritten."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import FileIO
    from pathlib import Path


class JsonLines:
    """Appends to a run folder's two files.

    Args:
        folder: the run folder.
        attempt: stands in every line: of two lines for one step, the one of the later attempt holds.
        say: takes a line for a person, where a file cannot be written.
    """

    def __init__(self, folder: Path, attempt: int, say: Callable[[str], None] | None = None) -> None:
        self._attempt = attempt
        self._metrics, self._events = Appender(folder / "metrics.jsonl", say), Appender(folder / "events.jsonl", say)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line: step, time, attempt, and the values; numbers that JSON lacks (NaN, infinity) become text."""
        row = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._write(self._metrics, {"step": step, **row})

    def event(self, kind: str, /, **facts: Any) -> None:
        """One line: what, when, attempt, and the facts."""
        self._write(self._events, {"event": kind, **facts})

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()

    def _write(self, lines: Appender, row: dict[str, Any]) -> None:
        lines.add({**row, "attempt": self._attempt, "time": round(time.time(), 3)})


class Appender:
    """A file of JSON lines that grows. What cannot be written, as on a full disk, is left out: no training ends for it.

    Args:
        path: made at the first line.
        say: takes a line for a person, the first time that something is left out.
    """

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self._path, self._say = path, say
        self._file: FileIO | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """One line."""
        try:
            self._write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            self._tell(error)
            self.close()  # opened anew for the next line, which then begins on its own

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._tell(error)

    def _write(self, line: bytes) -> None:
        if self._file is None:
            # Unbuffered: a reader (or a report after a SIGKILL) sees whole lines at once, and nothing comes late.
            self._file = self._path.open("ab", buffering=0)
            if self._path.stat().st_size > 0 and _last_byte(self._path) != b"\n":
                line = b"\n" + line  # a kill or a full disk has cut the last one
        while line:
            line = line[self._file.write(line) :]

    def _tell(self, error: OSError) -> None:
        say, self._say = self._say, None
        if say is not None:
            say(
                f"worldsize: {self._path.name}: {error.strerror}; training goes on, and lines are missing until it is writable"
            )


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of such a file, in order; a line cut by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def latest(rows: list[dict[str, Any]], value: str) -> dict[int, float]:
    """One number by step: of several lines for a step, that of the latest attempt."""
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        if value in row and row["attempt"] >= found.get(row["step"], (-1, 0.0))[0]:
            found[row["step"]] = (row["attempt"], float(row[value]))
    return {step: number for step, (_, number) in sorted(found.items())}


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)
