"""Room: after an attempt of a job has failed: what it was, in one line, and whether the job goes back into the queue.

A stop on request is the batch script's own affair and needs no Python. A failure comes again only where another attempt may
end differently, where this one committed a step that none before had, and as often as the job spec allows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.launch import endings, failure
from worldsize.launch.endings import Ending
from worldsize.launch.slurm import exitfile
from worldsize.launch.slurm.exitfile import Failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_TAIL = 1 << 18
_HEADER = "worldsize: job "
_LABEL = re.compile(r"^ *(\d+): ?", re.MULTILINE)
_SUMMARY = re.compile(
    r"Root Cause.*?host\s*: (?P<host>\S+).*?rank\s*: (?P<rank>\d+).*?exitcode\s*: (?P<code>-?\d+)", re.DOTALL
)
_ENDED = re.compile(
    r"^srun: error: \S+: tasks? \S+ (?:Exited with exit code (?P<code>\d+)|(?P<signal>[A-Z][\w ]+))", re.MULTILINE
)
_SIGNALS = {
    "Segmentation fault": 139,
    "Killed": 137,
    "Aborted": 134,
    "Bus error": 135,
    "Floating point exception": 136,
    "Illegal instruction": 132,
    "Out Of Memory": 137,
}
_PASSED_ON = 143
"""What ranks end with that srun ends because another one has failed."""
_SAID = re.compile(
    r"^(?: *\d+: ?)?worldsize: (?:rank (?P<rank>\d+) of \d+ on (?P<host>\S+?)(?: failed)?: |(?P<node>[\w.-]+): )(?P<what>.+)$",
    re.MULTILINE,
)
_NOISE = re.compile(r"^(?: *\d+: ?)?(?:srun: |slurmstepd|worldsize: job ).*\n?", re.MULTILINE)
_SUMMARY_OF_AGENT = "ChildFailedError"
_TRACE = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a job that has failed.

    Attributes:
        folder: the job's own.
        job: its id; number: which attempt.
        code: the exit code of its step.
        hosts: where each rank was; empty where that is not known.
        log: the file that all attempts write to.
        began: seconds since 1970.
    """

    folder: Path
    job: str
    number: str
    code: int
    hosts: Sequence[str] = ()
    log: Path | None = None
    began: float = 0.0

    @property
    def record(self) -> Path:
        """Its exit record."""
        return self.folder / f"exit-{self.job}-{self.number}"


@dataclass(frozen=True, slots=True)
class Next:
    """What happens to the job: whether it comes again, without which nodes, and why, in words."""

    again: bool
    why: str
    without: tuple[str, ...] = ()


def failed(attempt: Attempt) -> Failed:
    """What it failed of, from what its ranks left and printed: for launchers that do not write it down themselves."""
    text = tail(attempt.log)
    causes = [*_from_files(attempt), *_from_words(text), *_from_ranks(text, attempt.hosts)]
    root = failure.root(causes) if causes else None
    code = root_code(text, attempt.code)
    code = failure.SIGNALLED - code if code > failure.SIGNALLED else code
    line = root.line if root else failure.from_code(code, _NOISE.sub("", text))[0]
    ending = endings.from_text(line) or endings.from_text(text)
    if ending is None:
        ending = Ending.USER_ERROR if code > 0 else Ending.UNKNOWN
    return Failed(ending, root.host if root and root.host != "?" else None, line)


def root_code(text: str, code: int) -> int:
    """The exit code of the task or rank that failed first: srun says the highest one, and torchrun says 1."""
    summary = _SUMMARY.search(text)
    if summary:
        found = int(summary["code"])
        return failure.SIGNALLED - found if found < 0 else found
    for ended in _ENDED.finditer(text):
        found = int(ended["code"]) if ended["code"] else _SIGNALS.get(ended["signal"].strip(), _PASSED_ON)
        if found not in (0, _PASSED_ON):
            return found
    return code


def decide(attempt: Attempt, what: Failed, max_restarts: int) -> Next:
    """Whether the job comes again, after `what`, where failures may be tried again so often."""
    every = exitfile.attempts(attempt.folder, attempt.job)
    now = every.pop(attempt.record.name, exitfile.Told())
    before = max((told.step for told in every.values() if told.step is not None), default=-1)
    own = exitfile.line_of(every, attempt.job)
    used = sum(
        told.failed is not None and exitfile.job_of(name).partition("_")[0] in own for name, told in every.items()
    )
    if not what.ending.retry:
        return Next(again=False, why=f"{what.ending.value}, which would come again")
    if used >= max_restarts:
        return Next(again=False, why=f"{used} of {max_restarts} restarts are used")
    if now.step is None or now.step <= before:
        return Next(again=False, why=f"nothing was committed since step {max(before, 0)}")
    bad = [*(told.failed for told in every.values()), what]
    nodes = {each.host for each in bad if each and each.ending is Ending.NODE_FAILURE and each.host}
    nodes |= {host for told in (now, *every.values()) for host in told.left_out}
    return Next(
        again=True, why=f"{what.ending.value}, restart {used + 1} of {max_restarts}", without=tuple(sorted(nodes))
    )


def tail(log: Path | None) -> str:
    """What the newest attempt wrote to a log that all attempts share, its end at least."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text[max(0, text.rfind(f"\n{_HEADER}")) :]


def _from_files(attempt: Attempt) -> Iterator[failure.Failure]:
    """The exceptions that ranks of ours left in files of this attempt."""
    for path in (attempt.folder / f"logs-{attempt.job}").rglob("*error.json"):
        cause = failure.from_error_file(path)
        if cause is None:
            continue
        facts = json.loads(path.read_bytes())
        at = float(facts.get("time", 0.0))
        if at >= attempt.began:
            yield _failure(cause, facts.get("rank"), [facts.get("host") or "?"], len(attempt.hosts), at)


def _from_words(text: str) -> Iterator[failure.Failure]:
    """What ranks and tasks of ours said in one line, rank and host included."""
    for at, found in enumerate(_SAID.finditer(text)):
        host = found["host"] or found["node"]
        yield _failure(failure.Cause(found["what"]), found["rank"], [host], 1, at - 2e9)


def _from_ranks(text: str, hosts: Sequence[str]) -> Iterator[failure.Failure]:
    """The exceptions that ranks printed, each line with its rank before it, as srun does; or torchrun's summary."""
    printed: dict[str, list[str]] = {}
    began: dict[str, int] = {}
    for at, line in enumerate(text.splitlines()):
        label = _LABEL.match(line)
        if label:
            printed.setdefault(label[1], []).append(line[label.end() :])
            if _TRACE in line:
                began.setdefault(label[1], at)
    for rank, first in began.items():
        cause = failure.from_traceback("\n".join(printed[rank]))
        if cause is not None and not cause.what.startswith(_SUMMARY_OF_AGENT):
            where = hosts[int(rank) :][:1] or ["?"]
            yield _failure(cause, rank, where, len(hosts), first - 1e9)
    summary = _SUMMARY.search(text)
    if not began and summary:
        traces = (failure.from_traceback(_TRACE + part) for part in text.split(_TRACE)[1:])
        cause = next((found for found in traces if found and not found.what.startswith(_SUMMARY_OF_AGENT)), None)
        if cause is not None:
            yield _failure(cause, summary["rank"], [summary["host"]], len(hosts), -1e9)


def _failure(cause: failure.Cause, rank: str | None, hosts: Sequence[str], world: int, at: float) -> failure.Failure:
    number = int(rank) if rank is not None else None
    after = 2 if failure.follows(cause.what) else 0
    return failure.Failure(hosts[0], 1, cause.what, number, max(world, 1), cause.where, after=after, age=-at)
