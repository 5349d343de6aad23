"""Room: what ranks print: kept byte for byte in one file a rank and attempt, and shown by whole lines on the console.

With several ranks every line on the console begins with its rank. A Python traceback is held back while it is not yet
known whether the process ends with it: of the several tracebacks that one failure causes, the supervisor shows one.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque
from io import FileIO
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.launch.loop import Loop, Timer

OUT, ERR = 1, 2

_CHUNK = select.PIPE_BUF  # what a pipe that reports room takes without blocking
_BACKLOG = 1 << 20
_LONGEST_LINE = 1 << 16
_LONGEST_TRACEBACK = 1 << 18
_TAIL_LINES = 40
_HOLD_S = 2.0
"""Who prints that long after a traceback lives on; torch prints its farewells sooner."""
_SILENT_S = 10.0
"""Who is silent that long lives on too: no interpreter takes longer to end."""
_BEGINS = re.compile(
    rb"(?:\[rank\d+\]:\s?)?"
    rb"(?:\s*(?:\+ Exception Group )?Traceback \(most recent call last\):|  File \".*\", line \d+$)"
)


class Sink(Protocol):
    """Where the console's bytes go."""

    def write(self, stream: int, data: bytes) -> None:
        """Take `data` for OUT or ERR, all of it."""
        ...

    @property
    def full(self) -> bool:
        """Whether the reader is behind: let it catch up before reading more."""
        ...

    def when_room(self, call: Callable[[], None]) -> None:
        """Call once, when the reader has caught up."""
        ...

    def flush(self) -> None:
        """Write everything, however long the reader takes."""
        ...


class Terminal:
    """The standard streams, written without ever stopping the loop: a paused terminal must not hide a dead rank."""

    def __init__(self, loop: Loop) -> None:
        _fill_standard_streams()
        self._loop = loop
        self._queues: dict[int, deque[bytes]] = {OUT: deque(), ERR: deque()}
        self._closed: set[int] = set()
        self._waiting: list[Callable[[], None]] = []

    @property
    def full(self) -> bool:
        """Whether the reader is behind."""
        return sum(len(data) for queue in self._queues.values() for data in queue) > _BACKLOG

    def write(self, stream: int, data: bytes) -> None:
        """Write what can be written now, and keep the rest."""
        if stream in self._closed:
            return
        queue = self._queues[stream]
        queue.extend(data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))
        self._resume(stream)

    def when_room(self, call: Callable[[], None]) -> None:
        """Call once, when the reader has caught up."""
        self._waiting.append(call)

    def flush(self) -> None:
        """Write everything, however long the reader takes."""
        for stream, queue in self._queues.items():
            self._loop.unwatch(stream)
            while queue:
                self._put(stream, queue)

    def _drain(self, stream: int) -> None:
        queue = self._queues[stream]
        while queue and self._writable(stream):
            self._put(stream, queue)
        if queue:
            self._loop.watch(stream, lambda: self._resume(stream), write=True)
        if self._waiting and not self.full:
            calls, self._waiting = self._waiting, []
            for call in calls:
                call()

    def _resume(self, stream: int) -> None:
        self._loop.unwatch(stream)
        self._drain(stream)

    def _put(self, stream: int, queue: deque[bytes]) -> None:
        try:
            written = os.write(stream, queue[0])
        except BlockingIOError:  # somebody else made the terminal non-blocking
            select.select((), (stream,), ())
            return
        except OSError:  # the reader has gone; the files still have it all
            self._closed.add(stream)
            queue.clear()
            return
        if written == len(queue[0]):
            queue.popleft()
        else:
            queue[0] = queue[0][written:]

    @staticmethod
    def _writable(stream: int) -> bool:
        poll = select.poll()
        poll.register(stream, select.POLLOUT)
        return bool(poll.poll(0))


def _fill_standard_streams() -> None:
    """Where a daemon closed them, the next pipe would take their numbers, and get what is meant for the console."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 - its only form


class Printed:
    """`sys.stdout` and `sys.stderr` as they are now: a notebook's cell."""

    full = False

    def write(self, stream: int, data: bytes) -> None:
        """Print."""
        (sys.stdout if stream == OUT else sys.stderr).write(data.decode(errors="replace"))

    def when_room(self, call: Callable[[], None]) -> None:
        """There is always room."""
        call()

    def flush(self) -> None:
        """Flush both."""
        sys.stdout.flush()
        sys.stderr.flush()


class LogFile:
    """The bytes that one rank printed, in the order of arrival. Appends; never truncates.

    A disk that is full ends the file, not the training.
    """

    def __init__(self, path: Path, sink: Sink) -> None:
        self.path, self._sink = path, sink
        self._file: FileIO | None = FileIO(path, "a")

    def write(self, data: bytes) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        try:
            while self._file and rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._sink.write(ERR, os.fsencode(f"worldsize: {self.path} ends here: {error.strerror}\n"))
            self.close()

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, None
        if file:
            file.close()


class Stream:
    """One stream of one rank.

    Args:
        loop: for the time a traceback is held back.
        sink: the console.
        kind: OUT or ERR.
        log: the rank's log file.
        prefix: what every line on the console begins with; empty: bytes pass as they come, nothing is held back.
    """

    def __init__(self, loop: Loop, sink: Sink, kind: int, log: LogFile, prefix: bytes) -> None:
        self._loop, self._sink, self._kind, self._log, self._prefix = loop, sink, kind, log, prefix
        self._partial = b""
        self._ready: list[bytes] = []
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._timer: Timer | None = None
        self._to_the_end = False
        self.holding = False
        """Whether a traceback has come, and it is not known yet whether the process ends with it."""
        self.trace = b""
        """The newest traceback, and what was printed with it."""
        self.trace_began = 0.0
        """When it arrived, on the clock of `time.monotonic`."""

    @property
    def tail(self) -> bytes:
        """The last lines."""
        return b"".join(self._tail)

    def feed(self, data: bytes) -> None:
        """Take bytes as the process wrote them."""
        self.lives()
        self._log.write(data)
        lines = (self._partial + data).splitlines(keepends=True)
        # A \r at the end may be half of \r\n, so only \n ends the last line.
        self._partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST_LINE:
            self._line(self._partial)
            self._partial = b""
        self._show(data)

    @property
    def hidden(self) -> bytes:
        """What the console was not shown; with one rank it is shown everything."""
        return self.trace if self.holding and self._prefix else b""

    def lives(self) -> None:
        """The process prints: a traceback that is some time old was not its end."""
        if self.holding and not self._to_the_end and time.monotonic() - self.trace_began > _HOLD_S:
            self.release()

    def hold_on(self) -> None:
        """The process is ending: a traceback that is held back now is held to the end."""
        self._to_the_end = True
        if self._timer:
            self._timer.cancel()

    def end(self) -> None:
        """The process has ended: the last line may lack its newline; what is held back stays so, in `trace`."""
        if self._partial:
            self._line(self._partial + b"\n")
            self._partial = b""
            self._show(b"")
        self.hold_on()

    def release(self) -> None:
        """The process lives on, or ended well: what is held back is no failure."""
        if not self.holding:
            return
        self.holding = False
        self._ready.extend(self._prefix + line for line in self.trace.splitlines(keepends=True))
        self._show(b"")

    def _line(self, line: bytes) -> None:
        self._tail.append(line)
        if not self.holding and self._kind == ERR and _BEGINS.match(line):
            self.holding, self.trace, self.trace_began = True, b"", time.monotonic()
            if not self._to_the_end:
                self._timer = self._loop.later(_SILENT_S, self.release)
        if not self.holding:
            self._ready.append(self._prefix + line)
            return
        self.trace += line
        if len(self.trace) > _LONGEST_TRACEBACK:
            self.release()

    def _show(self, data: bytes) -> None:
        shown = b"".join(self._ready) if self._prefix else data
        self._ready.clear()
        if shown:
            self._sink.write(self._kind, shown)
