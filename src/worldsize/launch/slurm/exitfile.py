"""Room: the exit record of one attempt of a job: lines that rank 0, the supervisor and the batch script add.

One file an attempt, `exit-<job>-<attempt>` in the job's folder. Words: `committed <step>`, `stopped <step>`,
`failed <ending> <host> <the line>`, `left-out <host> <why>` before its ranks began, `ended <code>` and `followed <job>` where
another job goes on. Others are passed over: a later version may know more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.launch.endings import Ending

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Failed:
    """What failed: its kind, the host where it is known, and the one line."""

    ending: Ending
    host: str | None
    line: str

    @property
    def words(self) -> str:
        """Its line in the record."""
        return f"failed {self.ending.value.replace(' ', '-')} {self.host or '-'} {' '.join(self.line.split())}\n"


@dataclass(frozen=True, slots=True)
class Told:
    """What one attempt left. `step` is the newest that is committed, `stopped` whether it ended on request.

    `left_out` are the hosts that its preflight found bad.
    """

    step: int | None = None
    stopped: bool = False
    failed: Failed | None = None
    code: int | None = None
    follower: str | None = None
    left_out: tuple[str, ...] = ()


def read(path: Path) -> Told:
    """The record in a file; an empty one where there is none."""
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return Told()


def parse(text: str) -> Told:
    """The record in the text."""
    step, stopped, failed, code, follower, out = None, False, None, None, None, []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        number = _number(rest)
        if word in {"committed", "stopped"} and number is not None:
            step, stopped = max(number, step or 0), stopped or word == "stopped"
        elif word == "failed":
            failed = _failed(rest) or failed
        elif word == "left-out":
            out.append(rest.partition(" ")[0])
        elif word == "ended":
            code = number
        elif word == "followed":
            follower = rest.partition(";")[0].strip()
    return Told(step, stopped, failed, code, follower, tuple(out))


def attempts(folder: Path, job: str) -> dict[str, Told]:
    """What every attempt left of this job, or of this member of an array, whoever started it, by file name."""
    member = job.partition("_")[2]
    names = [path for path in folder.glob("exit-*") if job_of(path.name).partition("_")[2] == member]
    return {path.name: read(path) for path in sorted(names)}


def line_of(every: dict[str, Told], job: str) -> set[str]:
    """The numbers of this job and of those that it follows by itself; not of one that a person started again."""
    number = job.partition("_")[0]
    before = {job_of(name).partition("_")[0] for name, told in every.items() if told.follower == number}
    return {number}.union(*(line_of(every, each) for each in before))


def job_of(name: str) -> str:
    """The job whose record has this name."""
    return name.removeprefix("exit-").rpartition("-")[0]


def _number(text: str) -> int | None:
    word = text.partition(" ")[0]
    return int(word) if word.isascii() and word.isdigit() else None


def _failed(rest: str) -> Failed | None:
    kind, host, line = [*rest.split(" ", 2), "", ""][:3]
    ending = next((ending for ending in Ending if ending.value.replace(" ", "-") == kind), None)
    return Failed(ending, None if host == "-" else host, line) if ending else None
