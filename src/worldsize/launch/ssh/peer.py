"""Room: one host as the starter sees it: the command that leads there, what comes from it, what is told to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from worldsize.errors import NotStartedError
from worldsize.launch.logs import ERR, OUT
from worldsize.launch.ssh import remote, wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worldsize.launch.logs import Sink
    from worldsize.launch.loop import Loop
    from worldsize.launch.shell import Child, Group
    from worldsize.launch.ssh.remote import Way

_READ, _MOST_READS = 1 << 16, 64
_LONGEST_LINE = 1 << 16
_LONGEST_ARGUMENT = 1 << 17
"""Of one word of a command line, in the kernel."""
_NEWS_S = 10.0
"""Until the end of a host is known here: one that cannot be told may just have ended, told to by another."""
_NOISE = b"pdsh@"
"""How a line begins in which pdsh says the exit code once more."""


class Peer:
    """One host from its start to its end.

    Args:
        loop: serves its output and its end.
        sink: the console; lines come there whole.
        way: how it is reached, name: by which name, mark: of this start.
        changed: called when it has said something, or has ended.
    """

    def __init__(
        self, loop: Loop, sink: Sink, way: Way, *, name: str, mark: str, changed: Callable[[Peer], None]
    ) -> None:
        self._loop, self._sink, self._way, self.name, self._mark, self._changed = loop, sink, way, name, mark, changed
        self._partial: dict[int, bytes] = {OUT: b"", ERR: b""}
        self._early = b""
        self._pipe: str | None = None
        self._told: list[Child] = []
        self.ready: dict[str, Any] | None = None
        """Where it is reached and which version it has, once it is ready."""
        self.code: int | None = None

    def start(self, group: Group, environ: Mapping[str, str], job: wire.Job) -> None:
        """Start our process there. Raises NotStartedError where ssh or pdsh is not here."""
        self._group, self._environ, self._job = group, environ, job
        self._child = group.start(self._way.start(self.name, self._mark), environ, feed=self._way.feeds)
        for pipe in self._pipes:
            self._watch(pipe)
        self._loop.watch(self._child.ended, self._ended)
        if self._way.feeds:
            self.tell(wire.job_line(job))

    def tell(self, line: bytes) -> None:
        """Send it a line."""
        if self._way.feeds:
            self._child.write(line)
        elif self._pipe is not None and self.code is None:
            if len(line) >= _LONGEST_ARGUMENT:
                raise NotStartedError("arguments and variables are too long for pdsh", do="use --remote-shell ssh")
            argv = self._way.write(self.name, self._pipe, line)
            child = self._group.start(argv, self._environ)
            self._told.append(child)
            self._loop.watch(child.ended, lambda: self._was_told(child))

    @property
    def error(self) -> NotStartedError:
        """Why it ended before it was ready."""
        return remote.failed(self._way, self.name, self.code or 0, self._early.decode(errors="replace"))

    def release(self) -> None:
        """All are ready: what was printed so far is no part of an error."""
        self._sink.write(ERR, self._early)

    def close(self) -> None:
        """Give the descriptors back. The process has been ended."""
        for child in (self._child, *self._told):
            for descriptor in (child.ended, child.stdout, child.stderr):
                self._loop.unwatch(descriptor)
            child.close()

    @property
    def _pipes(self) -> dict[int, int]:
        return {self._child.stdout: OUT, self._child.stderr: ERR}

    def _watch(self, pipe: int) -> None:
        if self.code is None:
            self._loop.watch(pipe, lambda: self._readable(pipe))

    def _readable(self, pipe: int) -> None:
        if self._sink.full:
            self._loop.unwatch(pipe)
            self._sink.when_room(lambda: self._watch(pipe))
        elif self._take(pipe) == 0:
            self._loop.unwatch(pipe)

    def _take(self, pipe: int) -> int:
        """Pass on what is there; how much it was, -1 if nothing yet."""
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return -1
        stream = self._pipes[pipe]
        lines = (self._partial[stream] + data).splitlines(keepends=True)
        whole = not lines or lines[-1].endswith(b"\n") or len(lines[-1]) > _LONGEST_LINE
        self._partial[stream] = b"" if whole else lines.pop()
        self._lines(stream, lines)
        return len(data)

    def _lines(self, stream: int, lines: list[bytes]) -> None:
        if self.ready is None:
            for line in lines:
                self._hear(line)
        elif shown := b"".join(line for line in lines if not (stream == ERR and line.startswith(_NOISE))):
            self._sink.write(stream, shown)

    def _hear(self, line: bytes) -> None:
        said = wire.from_host(self._mark, line)
        if said is None:
            self._early += line if line.strip() else b""
            return
        word, values = said
        if word == "pipe":
            self._pipe = values["path"]
            self.tell(wire.job_line(self._job))
        elif word == "ready":
            self.ready = values
            self._changed(self)
        elif word == "error":
            raise NotStartedError(f"host {self.name}: {values['what']}", found=values["found"], do=values["do"])
        else:
            raise NotStartedError(
                f"host {self.name}: the working folder is not there",
                found=self._way.folder,
                do="start in a folder that all hosts have under the same path",
            )

    def _was_told(self, child: Child) -> None:
        self._loop.unwatch(child.ended)
        if child.code:
            self._loop.later(_NEWS_S, self._untold)

    def _untold(self) -> None:
        if self.code is None:
            self._sink.write(ERR, f"worldsize: host {self.name} could not be told to go or to stop\n".encode())

    def _ended(self) -> None:
        self._loop.unwatch(self._child.ended)
        code = self._child.code
        for pipe, stream in self._pipes.items():
            self._loop.unwatch(pipe)
            for _ in range(_MOST_READS):
                if self._take(pipe) <= 0:
                    break
            if self._partial[stream]:
                self._lines(stream, [self._partial[stream] + b"\n"])
        self.code = remote.LOST if code is None or code < 0 else code
        self._changed(self)
