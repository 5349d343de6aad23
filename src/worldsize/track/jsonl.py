"""Room: metrics.jsonl and events.jsonl of a run folder: one JSON object a line, appended, never rewritten."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class JsonLines:
    """Appends to a run folder's two files.

    Args:
        folder: the run folder.
        attempt: stands in every line: of two lines for one step, the one of the later attempt holds.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self._attempt = attempt
        self._metrics, self._events = append(folder / "metrics.jsonl"), append(folder / "events.jsonl")

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

    def _write(self, file: Any, row: dict[str, Any]) -> None:
        file.write(json.dumps({**row, "attempt": self._attempt, "time": round(time.time(), 3)}) + "\n")


def append(path: Path) -> TextIO:
    """Open a file at its end, on a line of its own: a kill may have cut the last one."""
    cut = path.exists() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
    # Line buffered: a reader (or a report after a SIGKILL) sees whole lines at once.
    file = path.open("a", buffering=1, encoding="utf-8")
    if cut:
        file.write("\n")
    return file


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
