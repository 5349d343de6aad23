"""Room: one attempt on one node: starts its ranks, keeps their output, passes signals on, ends the rest on failure."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_STOPPED
from worldsize.launch import env, failure
from worldsize.launch.logs import ERR, OUT, LogFile, Sink, Stream
from worldsize.launch.spare import has_torch
from worldsize.launch.verdict import Report
from worldsize.runtime.report import folder_of, newest_commit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from worldsize.launch.loop import Loop, Timer
    from worldsize.launch.plan import Plan, Share
    from worldsize.launch.shell import Child, Group
    from worldsize.launch.spare import Forked, Spares

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED = (*STOPS, signal.SIGUSR1, signal.SIGUSR2)

_READ = 1 << 16
_MOST_READS = 64

_COMMITTING_GRACE_S, _KILLED_GRACE_S = 0.5, 0.1
_WARM_AFTER_S, _LOOK_EVERY_S = 20.0, 0.1


@dataclass(slots=True)
class _Rank:
    rank: int
    child: Child | Forked
    log: LogFile
    streams: dict[int, Stream]
    """By descriptor: standard output, standard error."""
    code: int | None = None
    ended: float = 0.0
    killed: bool = False
    """It still ran when SIGKILL was sent from here."""

    @property
    def errors(self) -> Stream:
        return self.streams[self.child.stderr]


class Attempt:
    """The ranks of one node from start to end.

    Args:
        loop: serves their output, their ends and the clock.
        sink: the console.
        plan: what is started, and how long the ranks may take to end.
        share: which ranks.
        folder: for the logs of this attempt; it is there.
        spares: what stands by for this attempt, and for the next.
    """

    def __init__(self, loop: Loop, sink: Sink, plan: Plan, share: Share, folder: Path, *, spares: Spares) -> None:
        self._loop, self._sink, self._plan, self._share, self._folder = loop, sink, plan, share, folder
        self._tell: Callable[[], None] = lambda: None
        self._ranks: list[_Rank] = []
        self._spares = spares
        self._group: Group = spares.take()
        self._timers: list[Timer] = []
        self._ending: float | None = None
        self._stopped: int | None = None
        self._forwarded: set[int] = set()
        self._overdue = self._gives_way = False
        self._interrupted = False
        self._began = time.monotonic()

    def run(self, failed: Callable[[], None]) -> Report:
        """Start the ranks, serve them until all have ended, and say how. Call `failed` as soon as one has failed.

        Raises:
            LaunchError: the program cannot be started.
        """
        self._tell = failed
        try:
            base = env.read()
            base |= env.reachable(base, self._share)
            for local_rank in range(self._share.nproc):
                self._start(base, local_rank)
            self._prepare()
            self._loop.run(lambda: all(rank.code is not None for rank in self._ranks))
        finally:
            self._close()
        return self._report()

    def end(self, *, killed: bool = False) -> None:
        """Something failed, here or on another node: end what runs, SIGTERM first.

        SIGKILL follows after the plan's grace; soon where commits are reported: no commit comes without the failed rank.
        At once where that rank was killed: nobody has to be given time to say that he was the first.
        """
        if self._ending is not None:
            return
        self._ending = time.monotonic()
        for rank in self._running():
            rank.errors.hold_on()
            rank.child.send(signal.SIGTERM)
        self._warm()
        longest = _KILLED_GRACE_S if killed else _COMMITTING_GRACE_S
        grace = self._plan.peer_grace if self._committed() is None else min(self._plan.peer_grace, longest)
        self._timers.append(self._loop.later(grace, self._kill))

    def signal(self, number: int) -> None:
        """Pass a signal on. One that asks for the end starts the grace; a second SIGINT kills at once."""
        if number == signal.SIGINT and self._interrupted:
            self._forwarded.add(signal.SIGKILL)
            self._kill()
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._pass_on(number)

    def signal_elsewhere(self, number: int) -> None:
        """Pass on what the supervisor of another node was sent; once, as a scheduler may send it to all of them."""
        if number not in self._forwarded:
            self._pass_on(number)

    def give_way(self) -> None:
        """The world is to change: the ranks end as by SIGTERM, everything committed, and that is no stop of the run."""
        if self._ending is None and self._stopped is None and not self._gives_way:
            self._gives_way = True
            self._forwarded.add(signal.SIGTERM)
            self._expect_end()
            for rank in self._running():
                rank.child.send(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        self._forwarded.add(number)
        if number in STOPS and self._stopped is None:
            self._stopped = number
            self._expect_end()
        for rank in self._running():
            rank.child.send(number)

    def _start(self, base: Mapping[str, str], local_rank: int) -> None:
        share, several = self._share, self._share.world > 1
        rank = share.first_rank + local_rank
        variables = env.for_rank(base, self._plan, share, local_rank, self._folder)
        stdin = _reads(local_rank)
        spare = self._spares.order(variables, stdin=stdin)
        child = spare or self._group.start(self._plan.argv, variables, stdin=stdin)
        log = LogFile(self._folder / f"rank-{rank:04d}.log", self._sink)
        prefix = f"[rank {rank}] ".encode() if several else b""
        pipes = ((child.stdout, OUT), (child.stderr, ERR))
        streams = {pipe: Stream(self._loop, self._sink, kind, log, prefix) for pipe, kind in pipes}
        started = _Rank(rank, child, log, streams)
        self._ranks.append(started)
        for pipe in streams:
            self._watch(started, pipe)
        self._loop.watch(child.ended, lambda: self._has_ended(started))

    def _watch(self, rank: _Rank, pipe: int) -> None:
        if rank.code is None:
            self._loop.watch(pipe, lambda: self._readable(rank, pipe))

    def _readable(self, rank: _Rank, pipe: int) -> None:
        if self._sink.full:
            self._loop.unwatch(pipe)
            self._sink.when_room(lambda: self._watch(rank, pipe))
        elif _read(pipe, rank.streams[pipe]) == 0:
            self._loop.unwatch(pipe)
        else:
            rank.errors.lives()

    def _has_ended(self, rank: _Rank) -> None:
        self._loop.unwatch(rank.child.ended)
        rank.code, rank.ended = rank.child.code, time.monotonic()
        for pipe, stream in rank.streams.items():
            self._loop.unwatch(pipe)
            stream.hold_on()
            # What the rank wrote is in the pipe by now; a child that it left behind may go on writing for ever.
            for _ in range(_MOST_READS):
                if not _read(pipe, stream):
                    break
            stream.end()
        if rank.code in (0, EXIT_STOPPED):
            rank.errors.release()
        if rank.code == 0:
            return
        if rank.code == EXIT_STOPPED or self._asked_for(rank):
            self._expect_end()
        elif self._ending is None:
            self.end(killed=rank.code == -signal.SIGKILL)
            self._tell()

    def _expect_end(self) -> None:
        """The ranks are stopping: whoever has not ended after the grace is killed."""
        if not self._overdue:
            self._overdue = True
            self._timers.append(self._loop.later(self._plan.grace, self._kill))

    def _kill(self) -> None:
        if self._gives_way and self._ending is None:
            self._forwarded.add(signal.SIGKILL)  # whoever does not hear of a change is no failure
        for rank in self._running():
            rank.killed = rank.child.code is None
        self._group.kill()

    def _prepare(self) -> None:
        """Warm an interpreter for the next attempts, once this one is at work."""
        if self._ending is not None or not self._may_come_again or not self._running():
            return
        if self._is_settled(self._running()[0].child.pid):
            self._warm()
        else:
            self._timers.append(self._loop.later(_LOOK_EVERY_S, self._prepare))

    def _is_settled(self, pid: int) -> bool:
        """Whether what it will need is known: torch, as soon as it is seen there, or nothing large."""
        waited = time.monotonic() - self._began >= _WARM_AFTER_S
        return waited or self._committed() is not None or has_torch(pid)

    def _warm(self) -> None:
        """Warm it now, where there may be another attempt."""
        if self._may_come_again and (running := self._running()):
            base = env.read()
            base |= env.reachable(base, self._share)
            variables = env.for_rank(base, self._plan, self._share, 0, self._folder)
            self._spares.warm(running[0].child.pid, variables, commits=self._committed() is not None)

    @property
    def _may_come_again(self) -> bool:
        """Whether another attempt may follow for which something shall stand by."""
        again = self._plan.changes or self._share.restarts < self._plan.max_restarts
        return self._stopped is None and self._plan.spare and again

    def _committed(self) -> int | None:
        return newest_commit(env.commit_file(self._folder, self._share.node))

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _close(self) -> None:
        self._group.close()
        for timer in self._timers:
            timer.cancel()
        for rank in self._ranks:
            for pipe in (*rank.streams, rank.child.ended):
                self._loop.unwatch(pipe)
            rank.child.close()
            rank.log.close()

    # --- how it ended

    def _asked_for(self, rank: _Rank) -> bool:
        """Whether the rank ended by a signal that was passed on, in its own way."""
        assert rank.code is not None
        number = -rank.code if rank.code < 0 else rank.code - 128
        return number in self._forwarded

    def _report(self) -> Report:
        failures = [failed for rank in self._ranks if (failed := self._failure(rank)) is not None]
        asked = [abs(rank.code or 0) % 128 for rank in self._ranks if self._asked_for(rank)]
        stopped = self._stopped or (None if self._gives_way else next(iter(asked), None))
        return Report(tuple(rank.code or 0 for rank in self._ranks), tuple(failures), stopped, self._committed())

    def _failure(self, rank: _Rank) -> failure.Failure | None:
        assert rank.code is not None
        if rank.code in (0, EXIT_STOPPED) or self._asked_for(rank):
            return None
        cause, began = self._cause(rank)
        late = self._ending is not None and began > self._ending
        outlived = self._ending is not None and rank.ended > self._ending
        ended_by_us = outlived and rank.code in (-signal.SIGTERM, -signal.SIGKILL)
        if late and ended_by_us:
            return None
        text = rank.errors.tail.decode(errors="replace") + (cause.what if cause else "")
        after = 2 if late or failure.follows(text) else int(ended_by_us)
        stopping = self._stopped is not None or self._gives_way
        if stopping and (after or failure.interrupted(cause)):
            return None
        return self._describe(rank, cause, began, after)

    def _describe(self, rank: _Rank, cause: failure.Cause | None, began: float, after: int) -> failure.Failure:
        code = rank.code or 0
        if cause:
            what, do = cause.what, failure.advice(cause.what)
        elif rank.killed and code == -signal.SIGKILL:
            what, do = (
                f"did not end within {self._plan.grace:g} s of the stop, and was killed",
                "give it a longer --grace",
            )
        else:
            what, do = failure.from_code(code, rank.errors.tail.decode(errors="replace"))
            if code == -signal.SIGKILL and do and (held := self._held()):
                do = f"{do}; {held}"
        return failure.Failure(
            host=socket.gethostname(),
            code=code if code > 0 or not cause else 1,
            what=what,
            rank=rank.rank,
            world=self._share.world,
            where=cause.where if cause else None,
            do=do,
            log=str(rank.log.path),
            trace=failure.shorten(rank.errors.hidden.decode(errors="replace")),
            age=time.monotonic() - began,
            after=after,
        )

    def _held(self) -> str | None:
        """What the memory of a killed rank was needed for, where a run says so."""
        from worldsize.launch import held

        folder = folder_of(env.commit_file(self._folder, self._share.node))
        return None if folder is None else held.by(folder)

    def _cause(self, rank: _Rank) -> tuple[failure.Cause | None, float]:
        """The exception that ended the rank, and when it came."""
        path = env.error_file(self._folder, rank.rank)
        cause = failure.from_error_file(path)
        if cause:
            written = time.monotonic() - (time.time() - path.stat().st_mtime)
            return cause, min(written, rank.ended)
        errors = rank.errors
        if rank.code == 1 or errors.holding:
            text = errors.trace or errors.tail
            cause = failure.from_traceback(text.decode(errors="replace"))
            if cause:
                return cause, errors.trace_began or rank.ended
        return None, rank.ended


def _read(pipe: int, stream: Stream) -> int | None:
    """Pass on what is there, and say how much; None: nothing yet; 0: nothing any more."""
    try:
        data = os.read(pipe, _READ)
    except BlockingIOError:
        return None
    stream.feed(data)
    return len(data)


def _reads(local_rank: int) -> bool:
    """Whether the rank gets this process's standard input."""
    return local_rank == 0 and not _is_terminal(0)


def _is_terminal(descriptor: int) -> bool:
    """Whether it is a terminal, from which a process in the background may not read; a closed one counts as such."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return True
