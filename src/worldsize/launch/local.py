"""Room: a plan from start to exit code on this node: attempts, restarts, log folder, the last word on the console."""

from __future__ import annotations

import signal
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import env
from worldsize.launch.logs import ERR, Terminal
from worldsize.launch.loop import Loop
from worldsize.launch.meeting import ATTEMPTS, Alone
from worldsize.launch.scratch import Scratch
from worldsize.launch.slots import Here
from worldsize.launch.spare import Spares
from worldsize.launch.supervisor import FORWARDED, Attempt
from worldsize.launch.verdict import Report, Verdict
from worldsize.runtime import exits
from worldsize.runtime.report import folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.launch.endings import Ending
    from worldsize.launch.failure import Failure
    from worldsize.launch.logs import Sink
    from worldsize.launch.meeting import Meeting
    from worldsize.launch.plan import Plan


def run(plan: Plan, sink: Sink | None = None) -> int:
    """Start the ranks of this node, serve them to the end, and return the exit code of the whole job.

    The code is that of the first failing rank (128 + n after signal n), 75 where the ranks stopped on request, and 0
    where all of them succeeded. What failed is said in one line on standard error.

    Raises:
        LaunchError: the program cannot be started, a port is taken, or the nodes do not meet.
    """
    verdict = supervise(plan, sink, say=not plan.one_console or plan.node == 0)
    if verdict.cause is not None and not plan.node:
        _record(verdict.cause)
    return verdict.code


def supervise(plan: Plan, sink: Sink | None = None, *, say: bool = True) -> Verdict:
    """Like `run`, but returns the whole verdict; with `say=False` the caller tells what failed."""
    loop = Loop()
    console = sink or Terminal(loop)
    try:
        with _logs(plan) as (log_dir, verdicts):
            for verdict in _Supervisor(loop, console, plan, log_dir).run():
                verdicts.append(verdict)
                if say:
                    _say(console, verdict, several=plan.nproc > 1 or plan.nodes > 1)
        return verdicts[-1]
    finally:
        console.flush()
        loop.close()


class _Stopped(Exception):  # noqa: N818 - a request, not an error
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Supervisor:
    def __init__(self, loop: Loop, console: Sink, plan: Plan, log_dir: Path) -> None:
        self._loop, self._console, self._plan, self._log_dir = loop, console, plan, log_dir
        self._spares = Spares(loop, plan.argv)
        self._here = Here(plan, env.read())
        self._running: tuple[Attempt, Meeting] | None = None
        self._settling: Meeting | None = None
        self._asked = 0

    def run(self) -> Iterator[Verdict]:
        """Every attempt's verdict; only the last is final."""
        with (
            self._loop.signals(FORWARDED, self._signal),
            closing(self._spares),
            closing(self._meeting()) as meeting,
        ):
            try:
                yield from self._attempts(meeting)
            except _Stopped as stop:
                name = signal.Signals(stop.number).name
                yield Verdict(128 + stop.number, line=f"stopped by {name} while no rank was running")

    def _attempts(self, meeting: Meeting) -> Iterator[Verdict]:
        again = True
        while again:
            share = meeting.begin()
            if isinstance(share, Verdict):
                yield share
                return
            folder = self._log_dir / ATTEMPTS / str(share.folder)
            folder.mkdir(parents=True, exist_ok=True)
            attempt = Attempt(self._loop, self._console, self._here.plan, share, folder, spares=self._spares)
            meeting.watch(attempt)
            report = self._serve(attempt, meeting)
            verdict = self._settled(meeting, report)
            if verdict.cause is not None and not self._plan.node:
                _note(folder, verdict)
            yield verdict
            again = verdict.again
            if again:
                if self._asked:
                    raise _Stopped(self._asked)
                self._here.change(verdict.dropped, share)
                self._wait(self._plan.restart_delay)

    def _serve(self, attempt: Attempt, meeting: Meeting) -> Report:
        self._running = attempt, meeting
        try:
            return attempt.run(meeting.failed)
        finally:
            self._running = None

    def _settled(self, meeting: Meeting, report: Report) -> Verdict:
        self._settling, self._asked = meeting, 0
        try:
            return meeting.settle(replace(report, nproc=self._here.recount()))
        finally:
            self._settling = None

    def _signal(self, number: int) -> None:
        """To the ranks of all nodes while there are any; else it ends the waiting.

        Where this node's have ended, the others hear of it once, as ever: it may be what ended them, come by another way.
        """
        if self._running is None:
            if self._settling is None or self._asked:
                raise _Stopped(number)
            self._asked = number
            self._settling.signalled(number)
            return
        attempt, meeting = self._running
        attempt.signal(number)
        meeting.signalled(number)

    def _meeting(self) -> Meeting:
        if self._plan.nodes == 1:
            return Alone(self._plan, self._log_dir)
        from worldsize.launch import rendezvous

        return rendezvous.meet(self._loop, self._plan, self._log_dir, self._tell)

    def _tell(self, line: str) -> None:
        self._console.write(ERR, f"worldsize: {line}\n".encode(errors="replace"))

    def _wait(self, delay: float) -> None:
        over: list[bool] = []
        self._loop.later(delay, lambda: over.append(True))
        self._loop.run(lambda: bool(over))


def _record(cause: Failure) -> None:
    """For a batch script, where one waits: what kind of failure it was, where, and its line."""
    if not exits.expected():
        return
    from worldsize.launch.slurm.exitfile import Failed

    exits.append(exits.EXIT_FILE, Failed(_kind(cause), cause.host, cause.line).words)


def _note(folder: Path, verdict: Verdict) -> None:
    """Write the failure into the events of the run folder that the ranks named, where they did."""
    from worldsize.checkpoint import owner
    from worldsize.track.jsonl import JsonLines

    run = folder_of(env.commit_file(folder, 0))
    claim = None if run is None else owner.current(run)
    if run is None or claim is None or verdict.cause is None:
        return
    cause = verdict.cause
    facts = {"line": cause.line, "host": cause.host, "rank": cause.rank, "code": cause.code, "again": verdict.again}
    with suppress(OSError), closing(JsonLines(run, claim.attempt)) as lines:
        lines.event("failure", **facts, ending=_kind(cause).value)


def _kind(cause: Failure) -> Ending:
    from worldsize.launch import endings

    known = endings.from_text(f"{cause.trace}\n{cause.line}")
    return known or (endings.Ending.USER_ERROR if cause.code > 0 else endings.Ending.UNKNOWN)


def _say(console: Sink, verdict: Verdict, *, several: bool) -> None:
    """The traceback of the root cause, where the console does not have it yet, and the one line."""
    cause = verdict.cause
    if cause and cause.trace and not verdict.again:
        prefix = f"[rank {cause.rank}] " if several else ""
        lines = "".join(f"{prefix}{line}\n" for line in cause.trace.splitlines())
        console.write(ERR, lines.encode(errors="replace"))
    if verdict.line:
        console.write(ERR, f"worldsize: {verdict.line}\n".encode(errors="replace"))


@contextmanager
def _logs(plan: Plan) -> Iterator[tuple[Path, list[Verdict]]]:
    """The log folder, and the list of verdicts. A temporary folder stays where the last one sends a person to a log in it."""
    verdicts: list[Verdict] = []
    try:
        if plan.log_dir is not None:
            plan.log_dir.mkdir(parents=True, exist_ok=True)
        scratch = Scratch("logs") if plan.log_dir is None else None
    except OSError as error:
        raise LaunchError(
            "the log folder cannot be made", found=str(error), do="choose another --log-dir or TMPDIR"
        ) from error
    if scratch is None:
        assert plan.log_dir is not None
        yield plan.log_dir.resolve(), verdicts
        return
    with scratch:
        try:
            yield scratch.path, verdicts
        finally:
            if verdicts and verdicts[-1].cause:
                scratch.keep()
