"""Room: a run folder to facts: attempts, what each restart cost, curves, times, checkpoints, failures. Reads only that folder.

An attempt that was killed says nothing at its end: it ended with the last line that it wrote, which is at most a second old.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from worldsize.checkpoint import owner
from worldsize.errors import ConfigError
from worldsize.launch import endings
from worldsize.runtime import mark
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]

FILES = ("metrics", "times", "events")
LIVE_S = 120.0
"""A run of another host whose last sign is older is taken for dead."""
_NOT_CURVES = {"step", "epoch", "samples", "time", "attempt"}


@dataclass(slots=True)
class Attempt:
    """One start of a run. Times are seconds since 1970, lengths seconds.

    Attributes:
        began: when its first process did; started: when its first step did; ended: its last sign.
        first: the step that it began from; made: up to where it came; kept: up to where its work still counts.
        wait: since the attempt before had ended, or since the job was handed over; queued: whether a scheduler was waited for.
        how: finished, stopped, failed, lost (no word), running.
        why: in words.
        good: seconds of training that count.
        again: seconds of training whose steps were made again.
    """

    number: int
    began: float
    started: float | None
    ended: float
    first: int = 0
    made: int = 0
    kept: int = 0
    ranks: int = 1
    gpu: bool = False
    wait: float = 0.0
    queued: bool = False
    how: str = "lost"
    why: str = ""
    good: float = 0.0
    again: float = 0.0
    job: str | None = None
    facts: Row = field(default_factory=dict)

    @property
    def startup(self) -> float:
        """Until its first step, or its end."""
        return (self.ended if self.started is None else self.started) - self.began

    @property
    def held(self) -> float:
        """How long it had its devices."""
        return self.ended - self.began


@dataclass(slots=True)
class Restart:
    """What it cost that an attempt followed another.

    Attributes:
        steps: made twice.
        again: seconds in which they were made the first time; down: seconds between the two attempts; startup: of the second.
        device_seconds: `again` and `startup`, over all ranks.
    """

    after: int
    how: str
    steps: int
    again: float
    down: float
    startup: float
    device_seconds: float


@dataclass(slots=True)
class RunFacts:
    """What a run folder says."""

    name: str
    folder: str
    id: str
    read: float
    attempts: list[Attempt]
    restarts: list[Restart]
    metrics: list[Row]
    times: list[Row]
    events: list[Row]
    total: int | None = None

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]


def facts(folder: Path) -> RunFacts:
    """Everything that is known of a run.

    Raises:
        ConfigError: it is no run folder.
    """
    check(folder)
    return of(folder, *(read(folder / f"{name}.jsonl") for name in FILES))


def check(folder: Path) -> None:
    """Raises ConfigError where this is no run folder."""
    if not (folder / "events.jsonl").is_file() and not (folder / owner.ATTEMPTS).is_dir():
        raise ConfigError(
            "this is no run folder", found=str(folder), do="give the folder that Run or Trainer was given"
        )


def of(folder: Path, metrics: list[Row], times: list[Row], events: list[Row]) -> RunFacts:
    """The facts in these lines. Raises ConfigError where nothing has begun."""
    attempts = _attempts(folder, metrics, times, events)
    if not attempts:
        raise ConfigError("nothing has begun in this run folder", found=str(folder), do="wait for its first attempt")
    about = _json(folder / "run.json")
    restarts = _costs(attempts, metrics)
    total = next((row["total"] for row in reversed(events) if row.get("total") is not None), None)
    name = folder.resolve().name
    return RunFacts(
        name, str(folder), str(about.get("id", "")), time.time(), attempts, restarts, metrics, times, events, total
    )


def curves(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every number by name; of several for a step, that of the latest attempt; NaN where it is none."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_CURVES and isinstance(value, (int, float, str)):
                at = found.setdefault(name, {})
                if row["attempt"] >= at.get(row["step"], (-1, 0.0))[0]:
                    at[row["step"]] = (row["attempt"], _float(value))
    return {name: [(step, value) for step, (_, value) in sorted(at.items())] for name, at in found.items()}


def saves(events: list[Row]) -> list[Row]:
    """Checkpoints as they were committed."""
    return [row for row in events if row["event"] == "save"]


def failures(run: RunFacts) -> list[Row]:
    """Of each attempt that failed: what is told of it, with its class; where nobody told, so much."""
    found = []
    for attempt in run.attempts:
        told = [row for row in run.events if row["event"] == "failure" and row["attempt"] == attempt.number]
        if told:
            found.append({**_first(told), "attempt": attempt.number})
        elif attempt.how == "lost":
            line = "it ended without a word: killed, or its machine went away"
            found.append({"attempt": attempt.number, "line": line, "ending": "unknown", "time": attempt.ended})
    return found


def phases(rows: list[Row]) -> dict[str, tuple[float, float, float]]:
    """Seconds by phase: those of the rank with the least in each interval, of the median and the most, added up."""
    names = list(dict.fromkeys(name for row in rows for name in row["phases"]))
    each = {name: [row["phases"].get(name, [0.0, 0.0, 0.0]) for row in rows] for name in names}
    return {name: (_sum(found, 0), _sum(found, 1), _sum(found, 2)) for name, found in each.items()}


def ranks(rows: list[Row], what: str) -> list[dict[str, float]]:
    """For each rank least, mean and most seconds of a step, over the attempts of the newest size."""
    known = [row for row in rows if "by_rank" in row]
    size = known[-1]["ranks"] if known else 0
    known = [row for row in known if row["ranks"] == size]
    steps = sum(row["steps"] for row in known)
    spreads = [[row["by_rank"][what][rank] for row in known] for rank in range(size)]
    return [
        {
            "least": min(spread[0] for spread in found),
            "mean": sum(spread[4] * row["steps"] for spread, row in zip(found, known, strict=True)) / steps,
            "most": max(spread[3] for spread in found),
        }
        for found in spreads
    ]


def goodput(attempts: list[Attempt]) -> float | None:
    """Which share of the device time that was held went into training that counts."""
    held = sum(each.held * each.ranks for each in attempts)
    return sum(each.good * each.ranks for each in attempts) / held if held > 0 else None


def _attempts(folder: Path, *files: list[Row]) -> list[Attempt]:
    metrics, times, events = files
    claims = {
        int(path.parent.name): path
        for path in (folder / owner.ATTEMPTS).glob(f"*/{owner.OWNER}")
        if path.parent.name.isdecimal()
    }
    numbers = sorted(claims.keys() | {row["attempt"] for row in events})
    found = []
    for number in numbers:
        mine = [[row for row in rows if row["attempt"] == number] for rows in (metrics, times, events)]
        claim = _json(claims[number]) if number in claims else {}
        claimed = claims[number].stat().st_mtime if number in claims else None
        found.append(
            _attempt(number, claim, claimed, mark.read(folder / owner.ATTEMPTS / str(number) / mark.NAME), *mine)
        )
    if found:
        _ends(folder, found, events)
    return found


def _attempt(
    number: int, claim: Row, claimed: float | None, at: tuple[int, float] | None, *files: list[Row]
) -> Attempt:
    metrics, times, events = files
    marked, when = at or (0, 0.0)
    signs = [when] if when else []
    signs += [row["time"] for rows in (metrics, times, events) for row in rows]
    start = next((row for row in events if row["event"] in ("start", "resume")), None)
    signs = signs or [claimed or 0.0]
    facts = start or {}
    process = float(facts.get("began") or claim.get("started") or signs[0])
    began = min(process, *signs)
    first = int(facts.get("step", 0))
    made = [row["step"] + 1 for row in metrics if "samples" in row] + [
        row["step"] for row in events if row["event"] in ("stop", "end")
    ]
    devices = facts.get("devices", [])
    started = start["time"] if start else None
    return Attempt(
        number, began, started, max(signs), first, max([first, marked, *made]), ranks=int(facts.get("ranks", 1)),
        gpu=any("cuda" in device for device in devices), job=facts.get("job"), facts=facts,
    )  # fmt: skip


def _ends(folder: Path, attempts: list[Attempt], events: list[Row]) -> None:
    """How each ended, how long the next was waited for, and what of its work counts."""
    for number, attempt in enumerate(attempts):
        mine = {row["event"]: row for row in events if row["attempt"] == attempt.number}
        follows = attempts[number + 1] if number + 1 < len(attempts) else None
        attempt.how, attempt.why = _how(mine, alive=follows is None and _alive(folder, attempt))
        if follows is not None and follows.started is not None:
            attempt.kept = min(follows.first, attempt.made)
        elif attempt.how in ("finished", "stopped", "running"):
            attempt.kept = attempt.made
        else:
            steps = [row["step"] for row in events if row["event"] == "save" and row["attempt"] <= attempt.number]
            attempt.kept = min(max(steps, default=0), attempt.made)
        _wait(attempt, attempts[number - 1] if number else None)


def _wait(attempt: Attempt, before: Attempt | None) -> None:
    """How long it was waited for, and whether in a queue: not by an attempt that follows inside of one job."""
    same = before is not None and all(
        before.facts.get(name) == attempt.facts.get(name) for name in ("job", "restarts")
    )
    attempt.queued = bool(attempt.job) and not same
    if attempt.queued:
        attempt.began = min(attempt.began, float(attempt.facts.get("started") or math.inf))
    since = [each for each in (before.ended if before else None, attempt.facts.get("submitted")) if each is not None]
    attempt.wait = max(0.0, attempt.began - max(since)) if since else 0.0


def _how(mine: dict[str, Row], *, alive: bool) -> tuple[str, str]:
    if "end" in mine:
        return "finished", str(mine["end"].get("reason", ""))
    if "stop" in mine:
        return "stopped", f"on request ({mine['stop'].get('reason', '')})"
    if "failure" in mine:
        return "failed", _class(mine["failure"])
    return ("running", "") if alive else ("lost", "without a word")


def _alive(folder: Path, attempt: Attempt) -> bool:
    claim = owner.current(folder)
    if claim is None or claim.released:
        return False
    return owner.alive(claim) or (not _here(claim) and time.time() - attempt.ended < LIVE_S)


def _here(claim: owner.Owner) -> bool:
    import socket

    return claim.host == socket.gethostname()


def _class(row: Row) -> str:
    known = row.get("ending")
    return str(known) if known else str(endings.from_text(str(row.get("line", ""))) or endings.Ending.USER_ERROR)


def _first(told: list[Row]) -> Row:
    """Of several ranks that failed, the first that does not only say that another is gone."""
    from worldsize.launch.failure import follows

    row = next((row for row in told if not follows(str(row.get("line", "")))), told[0])
    return {**row, "ending": _class(row)}


def _costs(attempts: list[Attempt], metrics: list[Row]) -> list[Restart]:
    """What each restart cost; sets what of each attempt's training counts."""
    found = []
    for attempt in attempts:
        if attempt.started is not None:
            until = attempt.ended if attempt.kept >= attempt.made else _time_of(attempt, metrics)
            attempt.good, attempt.again = until - attempt.started, attempt.ended - until
    for before, after in pairwise(attempts):
        lost = before.again * before.ranks + after.startup * after.ranks
        steps = before.made - before.kept
        found.append(Restart(before.number, before.how, steps, before.again, after.wait, after.startup, lost))
    return found


def _time_of(attempt: Attempt, metrics: list[Row]) -> float:
    """When the state existed from which was gone on."""
    times = [
        row["time"]
        for row in metrics
        if row["attempt"] == attempt.number and "samples" in row and row["step"] < attempt.kept
    ]
    assert attempt.started is not None
    return float(max([attempt.started, *times]))


def _sum(found: list[list[float]], place: int) -> float:
    return sum(each[place] for each in found)


def _float(value: float | str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _json(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
