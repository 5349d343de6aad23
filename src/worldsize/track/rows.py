"""Room: the two files of a run folder as one training: rows that hold, in the order of steps, read as they are written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from worldsize.track.base import Row
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_AHEAD = 2000
"""So many steps are read ahead at most."""
_ABOUT = ("step", "attempt", "time")


class Tail:
    """Follows metrics.jsonl. Of the lines of several attempts, those hold that no later attempt came back behind.

    Args:
        folder: the run folder, in whose events every attempt has its first step.
        through: steps below this are not wanted.
        attempt: which one this is.
        rewinds: whether steps that were taken may come again, where the attempt itself went back.
    """

    def __init__(self, folder: Path, through: int, attempt: int, *, rewinds: bool = False) -> None:
        self.through = through
        self.back: int | None = None
        """The step that the attempt went back to, where what was taken from there on does not hold any more."""
        self._file, self._offset = folder / "metrics.jsonl", 0
        events = read(folder / "events.jsonl")
        self._ends = holds(events)
        self._own, self._first = attempt, _firsts(events).get(attempt, 0)
        self._rewinds, self._before = rewinds, (-1, -1)
        self._ahead: dict[int, Row] = {}

    def take(self, ready: Callable[[Row], bool], whole: float) -> list[Row]:
        """The next steps that are `ready`, some at a time; empty where there are none.

        Args:
            ready: asked of each, in the order of steps, up to the first that is not.
            whole: steps below this have all their lines; of others the newest in the file waits for a later one.
        """
        more = self._read()
        found: list[Row] = []
        newest = max(self._ahead, default=-1)
        for step in sorted(self._ahead):
            if not ready(self._ahead[step]) or (step == newest and (more or step >= whole)):
                break
            found.append(self._ahead.pop(step))
        if found:
            self.through = found[-1].step + 1
        return found

    def _read(self) -> bool:
        """Read on; True where there is more."""
        if not self._file.exists():
            return False
        with self._file.open("rb") as file:
            file.seek(self._offset)
            while len(self._ahead) < _AHEAD:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return False
                self._offset += len(line)
                self._add(line)
        return True

    def _go_back(self, step: int) -> None:
        self._ahead = {ahead: row for ahead, row in self._ahead.items() if ahead < step}
        if self._rewinds and step < self.through:
            self.through = self.back = step

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step, attempt = row["step"], row["attempt"]
        except (ValueError, KeyError):
            return  # cut by a kill
        if step >= self._ends.get(attempt, step + 1):
            return
        if self._before[0] == attempt and step < self._before[1]:
            self._go_back(step)
        self._before = attempt, step
        if step < self.through:
            if attempt != self._own or step >= self._first:
                return
            # What an interrupted step's body logs when it is done again; the step itself is there.
            step = self.through
        before = self._ahead.get(step)
        values = {name: float(value) for name, value in row.items() if name not in _ABOUT}
        self._ahead[step] = Row(step, row["time"], {**(before.values if before else {}), **values})


def _firsts(events: list[dict[str, Any]]) -> dict[int, int]:
    return {row["attempt"]: row["step"] for row in events if row.get("event") in ("start", "resume")}


def holds(events: list[dict[str, Any]]) -> dict[int, int]:
    """Attempt -> the step from which later attempts hold; without those of which that is not known."""
    first = _firsts(events)
    return {
        attempt: min(step for later, step in first.items() if later > attempt)
        for attempt in range(max(first, default=0))
    }


def ended(events: list[dict[str, Any]], before: int) -> list[str]:
    """How each attempt before this number ended, in words; without a word of its own it was killed."""
    found: dict[int, str] = {}
    for row in events:
        attempt, kind = row.get("attempt", before), row.get("event")
        if attempt >= before:
            continue
        found.setdefault(attempt, "killed")
        if kind in ("stop", "end"):
            found[attempt] = f"{'stopped' if kind == 'stop' else 'finished'} at step {row['step']} ({row['reason']})"
        if kind == "failure":
            found[attempt] = f"failed: {row.get('line', '')}"
    return [f"{attempt}: {words}" for attempt, words in sorted(found.items())]
