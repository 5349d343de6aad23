"""Room: what follows from how the ranks of all nodes ended: the exit code, the one line, whether to start again."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_STOPPED
from worldsize.launch import failure
from worldsize.launch.failure import Failure, root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class Remedies(Protocol):
        """What is done about a failure."""

        def __call__(self, cause: Failure, /, *, further: bool) -> Remedy:
            """Of the first failure of an attempt; `further`: it had committed something new."""
            ...


@dataclass(frozen=True, slots=True)
class Report:
    """How the ranks of one node ended."""

    codes: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    stopped: int | None = None
    """The signal that asked this node's supervisor to stop."""
    step: int | None = None
    """The newest step that was committed in this attempt, where the program says so."""
    nproc: int | None = None
    """How many ranks this node could start now; None: as many as before."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """The inverse of `to_json`."""
        failures = tuple(Failure(**failure) for failure in values["failures"])
        return cls(tuple(values["codes"]), failures, values["stopped"], values["step"], values["nproc"])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all supervisors do next."""

    code: int
    again: bool = False
    line: str | None = None
    cause: Failure | None = None
    dropped: int | None = None
    """The rank whose slot is left out from now on."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_json`."""
        cause = Failure(**values["cause"]) if values["cause"] else None
        return cls(values["code"], values["again"], values["line"], cause, values["dropped"])


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is done about a failure besides starting the same again."""

    then: str = ""
    """How it goes on: " with 2 ranks on 2 nodes"."""
    excused: bool = False
    """The program need not have committed anything: it was not to blame."""
    free: bool = False
    """It does not count."""
    dropped: int | None = None
    """The rank whose slot is left out."""


def as_before(_cause: Failure, /, *, further: bool) -> Remedy:  # noqa: ARG001 - the answer to every failure
    """The same again."""
    return Remedy()


@dataclass(slots=True)
class Judge:
    """Decides after each attempt.

    Failed ranks are started again up to `max_restarts` times, as torchrun does; but where the program reports its
    commits, only while each attempt commits a step that none before it had. A stop on request is never undone.
    """

    max_restarts: int = 0
    restarts: int = 0
    step: int | None = field(default=None)
    renews: bool = False
    """The number begins anew with every new commit: where the world may change."""
    used: int = 0

    def decide(self, reports: Sequence[Report], remedy: Remedies = as_before, change: str | None = None) -> Verdict:
        """The verdict over one attempt; counts the restart that it orders.

        Args:
            reports: of all nodes.
            remedy: asked what is done about a failure that may be followed by a restart.
            change: why the ranks were asked to end, and how it goes on, where the world was to change.
        """
        stopped = next((report.stopped for report in reports if report.stopped is not None), None)
        failures = [failure for report in reports for failure in report.failures]
        codes = [code for report in reports for code in report.codes]
        further = self._further(reports)
        if not failures:
            if change and stopped is None and any(codes):
                return Verdict(EXIT_STOPPED, again=True, line=f"{change}{self._from_step}")
            return self._ended(codes, stopped)
        cause = root(failures)
        if stopped is not None or self.max_restarts == 0:
            return Verdict(cause.exit_code, line=cause.line, cause=cause)
        return self._again(cause, remedy(cause, further=further), progress=further or self.step is None)

    def _again(self, cause: Failure, remedy: Remedy, *, progress: bool) -> Verdict:
        why = None
        if failure.returns(cause.what):
            why = "it would stop there again"
        elif not progress and not remedy.excused:
            why = f"nothing was committed since step {self.step}"
        elif self.used >= self.max_restarts and not remedy.free:
            why = f"{self.used} of {self.max_restarts} restarts used"
        if why:
            return Verdict(cause.exit_code, line=f"{cause.line} (not started again: {why})", cause=cause)
        self.restarts += 1
        self.used += not remedy.free
        then = f"{remedy.then}{self._from_step}" if remedy.then else ""
        counted = "" if remedy.free else f", {self.used} of {self.max_restarts}"
        line = f"{cause.line} (starting again{then}{counted})"
        return Verdict(cause.exit_code, again=True, line=line, cause=cause, dropped=remedy.dropped)

    @property
    def _from_step(self) -> str:
        return "" if self.step is None else f" from step {self.step}"

    def _further(self, reports: Sequence[Report]) -> bool:
        """Whether this attempt committed a step that none before it had."""
        newest = max((report.step for report in reports if report.step is not None), default=None)
        further = newest is not None and (self.step is None or newest > self.step)
        if further:
            self.step = newest
            self.used = 0 if self.renews else self.used
        return further

    @staticmethod
    def _ended(codes: list[int], stopped: int | None) -> Verdict:
        if EXIT_STOPPED in codes:
            return Verdict(EXIT_STOPPED, line="stopped on request, everything committed; start it again to go on")
        if any(codes) and stopped is not None:
            return Verdict(128 + stopped, line=f"stopped by {signal.Signals(stopped).name}")
        return Verdict(0)
