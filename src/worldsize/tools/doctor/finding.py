"""Room: one finding: how bad, which hosts, what was measured, what was expected, what to do. Values and their text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        check: a word for what was looked at: names, ports, disk, ...
        level: how bad.
        what: one line.
        where: the hosts that it is about; none: all of them.
        measured: the figure; expected: what it should be.
        do: the cure.
        own: whether it is a fault of the hosts in `where` themselves, so that leaving them out is a cure too.
    """

    check: str
    level: Level
    what: str
    where: tuple[str, ...] = ()
    measured: str = ""
    expected: str = ""
    do: str = ""
    own: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def lines(self) -> list[str]:
        """For people."""
        hosts = f"{', '.join(self.where)}: " if self.where else ""
        told = [f"{self.level.value:8} {self.check:12} {hosts}{self.what}"]
        facts = (("measured", self.measured), ("expected", self.expected), ("Do", self.do))
        shown = facts if self.level is not Level.OK else facts[:1]
        return told + [f"{'':22}{name}: {text}" for name, text in shown if text]


def ok(check: str, what: str, measured: str = "") -> Finding:
    """Nothing to mend."""
    return Finding(check, Level.OK, what, measured=measured)


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Those that must be mended."""
    return [finding for finding in findings if finding.level is Level.PROBLEM]


def culprits(findings: Iterable[Finding]) -> dict[str, str]:
    """Host -> its first problem, for hosts that are at fault themselves."""
    found: dict[str, str] = {}
    for finding in problems(findings):
        for host in finding.where if finding.own else ():
            found.setdefault(host, f"{finding.check}: {finding.what}")
    return found


def report(findings: Sequence[Finding]) -> Iterator[str]:
    """All findings, the worst last, where a reader ends; then how many of each."""
    for level in Level:
        for finding in findings:
            if finding.level is level:
                yield from finding.lines
    counts = [(sum(finding.level is level for finding in findings), level.value) for level in Level]
    yield ", ".join(f"{count} {word}" for count, word in counts)
