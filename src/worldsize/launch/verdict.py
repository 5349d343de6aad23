"""Room: what follows from how the ranks of all nodes ended: the exit code, the one line, whether to start again."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_STOPPED
from worldsize.launch.failure import Failure, root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Report:
    """How the ranks of one node ended."""

    codes: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    stopped: int | None = None
    """The signal that asked this node's supervisor to stop."""
    step: int | None = None
    """The newest step that was committed in this attempt, where the program says so."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """The inverse of `to_json`."""
        failures = tuple(Failure(**failure) for failure in values["failures"])
        return cls(tuple(values["codes"]), failures, values["stopped"], values["step"])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all supervisors do next."""

    code: int
    again: bool = False
    line: str | None = None
    cause: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_json`."""
        cause = Failure(**values["cause"]) if values["cause"] else None
        return cls(values["code"], values["again"], values["line"], cause)


@dataclass(slots=True)
class Judge:
    """Decides after each attempt.

    Failed ranks are started again up to `max_restarts` times, as torchrun does; but where the program reports its
    commits, only while each attempt commits a step that none before it had. A stop on request is never undone.
    """

    max_restarts: int = 0
    restarts: int = 0
    step: int | None = field(default=None)

    def decide(self, reports: Sequence[Report]) -> Verdict:
        """The verdict over one attempt; counts the restart that it orders."""
        stopped = next((report.stopped for report in reports if report.stopped is not None), None)
        failures = [failure for report in reports for failure in report.failures]
        progress = self._progress(reports)
        if not failures:
            return self._ended([code for report in reports for code in report.codes], stopped)
        cause = root(failures)
        if stopped is not None or self.max_restarts == 0:
            return Verdict(cause.exit_code, line=cause.line, cause=cause)
        if not progress:
            why = f"not started again: nothing was committed since step {self.step}"
            return Verdict(cause.exit_code, line=f"{cause.line} ({why})", cause=cause)
        if self.restarts >= self.max_restarts:
            why = f"not started again: {self.restarts} of {self.max_restarts} restarts used"
            return Verdict(cause.exit_code, line=f"{cause.line} ({why})", cause=cause)
        self.restarts += 1
        line = f"{cause.line} (starting again, {self.restarts} of {self.max_restarts})"
        return Verdict(cause.exit_code, again=True, line=line, cause=cause)

    def _progress(self, reports: Sequence[Report]) -> bool:
        """Whether this attempt went further than those before it, or nobody says how far it went."""
        newest = max((report.step for report in reports if report.step is not None), default=None)
        further = newest is not None and (self.step is None or newest > self.step)
        if further:
            self.step = newest
        return further or self.step is None

    @staticmethod
    def _ended(codes: list[int], stopped: int | None) -> Verdict:
        if EXIT_STOPPED in codes:
            return Verdict(EXIT_STOPPED, line="stopped on request, everything committed; start it again to go on")
        if any(codes) and stopped is not None:
            return Verdict(128 + stopped, line=f"stopped by {signal.Signals(stopped).name}")
        return Verdict(0)
