"""Room: the doctor at the start of a job: which nodes are left out, whether the job goes on without them or comes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.launch.endings import Ending
from worldsize.launch.slurm import exitfile
from worldsize.runtime.hostlist import expand
from worldsize.tools.doctor.finding import culprits, problems

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from worldsize.tools.doctor.finding import Finding

_MOST = 3
"""Attempts in a row that found bad nodes, after which the job does not come again: the cluster has too many of them."""
_MANY = 0.5
"""Where more nodes than this share of them are bad, it is not the nodes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a batch script wants to know.

    Attributes:
        folder, job, attempt: whose record it is.
        nodes: how many the training needs.
        allocated: how many the job has.
        wanted: nodes that the job must have.
        exclude: nodes that it never has.
    """

    folder: Path
    job: str
    attempt: str
    nodes: int
    allocated: int
    wanted: str = ""
    exclude: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows: `go` on without the nodes, come `again` without them, or `end`; and why."""

    word: str
    without: tuple[str, ...] = ()
    why: str = ""

    @property
    def text(self) -> str:
        """For the script: the word, and the nodes."""
        return f"{self.word} {','.join(self.without)}".strip()


def decide(request: Request, findings: Sequence[Finding]) -> Answer:
    """What follows from the findings. Nodes that earlier attempts left out stay out."""
    found = culprits(findings)
    if not found:
        rest = len(problems(findings))
        return Answer("go", why=f"{rest} problems, none of a single node: going on" if rest else "no problem found")
    names = ", ".join(f"{host} ({why})" for host, why in found.items())
    if len(found) > _MANY * request.allocated:
        return Answer("go", why=f"most of the nodes have problems, so it is not the nodes; going on: {names}")
    if request.allocated - len(found) >= request.nodes:
        return Answer("go", tuple(found), f"going on without {names}")
    must = sorted(set(found) & set(expand(request.wanted) if request.wanted else ()))
    if must:
        return Answer("end", tuple(found), f"nodelist asks for bad nodes, {', '.join(must)}: {names}")
    before = [told for name, told in _earlier(request).items() if told.left_out]
    if len(before) >= _MOST:
        return Answer("end", tuple(found), f"{len(before)} attempts before this one had bad nodes too: {names}")
    every = {*found, *(node for told in before for node in told.left_out)}
    every |= set(expand(request.exclude) if request.exclude else ())
    return Answer("again", tuple(sorted(every)), f"again without {names}")


def record(request: Request, answer: Answer, findings: Sequence[Finding]) -> None:
    """Leave the bad nodes in the exit record: later attempts stay away from them too."""
    found = culprits(findings) if answer.without else {}
    lines = [f"left-out {host} {why}\n" for host, why in found.items()]
    if answer.word == "end":
        host = next(iter(found))
        lines.append(exitfile.Failed(Ending.NODE_FAILURE, host, f"preflight: {answer.why}").words)
    file = request.folder / f"exit-{request.job}-{request.attempt}"
    with file.open("a", encoding="utf-8") as record:
        record.writelines(lines)


def _earlier(request: Request) -> dict[str, exitfile.Told]:
    return exitfile.attempts(request.folder, request.job)
