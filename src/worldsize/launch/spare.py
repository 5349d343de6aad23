"""Room: the interpreter that stands by for the next attempts of a node, so that a restart need not import everything again.

One is enough for all ranks: each is forked from it. It is a child of the supervisor in a process group of its own and serves
every attempt that follows; its forks join the group of their attempt.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import NotStartedError
from worldsize.launch.shell import Child, Group
from worldsize.launch.standby import NUMBER, READY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.launch.loop import Loop

_ANSWER_S = 5.0
_IMPORT_S = 120.0
"""How long a restart waits for what is still importing: it began earlier than anything that would be started now."""
_BOOT = (
    "import sys; sys.flags.safe_path or sys.path.__setitem__(0, sys.argv[2]); "
    "from worldsize.launch.standby import main; "
    "main(int(sys.argv[1]), sys.argv[3].split(), [*sys.orig_argv[:2], *sys.argv[4:]])"
)
_SETS_VARIABLES = re.compile(rb"\bputenv\b|\benviron\s*(?:\[[^]\n]*\]\s*=[^=]|\.\s*(?:setdefault|update|pop)\b|\|=)")
"""Ways of setting an environment variable, in the text of a program."""
_TORCH = "/libtorch_cpu."
_OURS = b"worldsize"
_WITH_TORCH = ("torch", "torch._dynamo")
"""The second comes with the first optimizer, and takes almost as long as the first."""
_COMMITTING = (
    "worldsize.train.run",
    "worldsize.train.trainer",
    "worldsize.strategies.ddp",
    "worldsize.checkpoint.store",
)


class Team(Group):
    """The process group of one attempt, which forks can join."""

    @property
    def number(self) -> int:
        """Of the process group."""
        return self._guard.pid


@dataclass(slots=True)
class Forked:
    """A rank that was forked from what stands by: to its supervisor, like a `Child`."""

    pid: int
    ended: int
    """A descriptor that becomes readable when the process has ended."""
    stdout: int
    stderr: int
    _answers: socket.socket
    _code: int | None = None

    @property
    def code(self) -> int | None:
        """The exit code, -n after signal n, None while it runs."""
        if self._code is None and _readable(self.ended):
            # Where the interpreter that it was forked from is gone too, nobody knows any better.
            self._code = _number(self._answers, -signal.SIGKILL)
        return self._code

    def send(self, number: int) -> None:
        """Send a signal to the process itself. Nothing happens where it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.ended, number)

    def close(self) -> None:
        """Give the descriptors back."""
        self._answers.close()
        for descriptor in (self.ended, self.stdout, self.stderr):
            os.close(descriptor)


@dataclass(slots=True)
class _Standby:
    group: Group
    child: Child
    line: socket.socket
    ready: bool = False

    def close(self) -> None:
        self.line.close()
        self.group.close()
        self.child.close()


class Spares:
    """What stands by for the ranks of the next attempts.

    Args:
        loop: tells when it is ready.
        argv: the program; only Python scripts and modules can be stood by for.
    """

    def __init__(self, loop: Loop, argv: Sequence[str]) -> None:
        self._loop, self._argv = loop, list(argv)
        self._source = _source(self._argv)
        self._standby: _Standby | None = None
        self._team: Team | None = None

    def warm(self, like: int, env: Mapping[str, str], *, commits: bool) -> None:
        """Have an interpreter import ahead, where none does yet.

        Args:
            like: the number of a running process: what it has loaded is loaded ahead.
            env: the environment of a rank so far.
            commits: the program reports its commits.
        """
        if self._standby is not None or self._source is None or not _can_wait(self._source):
            return
        # What Python puts first on its search path.
        first = str(Path.cwd() if self._argv[2] == "-m" else self._source.resolve().parent)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (
            *self._argv[:2],
            "-c",
            _BOOT,
            str(its.fileno()),
            first,
            " ".join(self._modules(like, commits=commits)),
        )
        words = (*words, *self._argv[2:])  # so that a list of processes shows whose it is
        group = Group()
        with its:
            try:
                child = group.start(words, env, keep=(its.fileno(),))
            except NotStartedError:
                ours.close()
                group.close()
                return
        self._standby = _Standby(group, child, ours)
        self._loop.watch(ours.fileno(), self._heard)

    def take(self) -> Team:
        """The process group for the attempt that begins now. Waits for what is still importing for it."""
        late = self._loop.later(_IMPORT_S, self._drop)
        self._loop.run(lambda: self._standby is None or self._standby.ready)
        late.cancel()
        self._team = Team()
        return self._team

    def order(self, env: Mapping[str, str], *, stdin: bool = False) -> Forked | None:
        """Fork a rank that becomes the program, with exactly `env`; None where nothing stands by."""
        if self._standby is None or self._team is None:
            return None
        try:
            return _ordered(self._standby.line, self._team.number, env, stdin=stdin)
        except OSError:
            self._drop()
            return None

    def close(self) -> None:
        """End it."""
        self._drop()

    def _modules(self, like: int, *, commits: bool) -> tuple[str, ...]:
        """The slow modules that the process has loaded or will load, as far as it shows from outside."""
        assert self._source is not None
        if not has_torch(like):
            return ()
        commits = commits or _OURS in self._source.read_bytes()
        return (*_WITH_TORCH, *(_COMMITTING if commits else ()))

    def _heard(self) -> None:
        assert self._standby is not None
        self._standby.ready = self._standby.line.recv(1) == READY
        if not self._standby.ready:
            self._drop()

    def _drop(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            self._loop.unwatch(standby.line.fileno())
            standby.close()


def _ordered(line: socket.socket, group: int, env: Mapping[str, str], *, stdin: bool) -> Forked:
    """Have a rank forked. Raises OSError."""
    with ExitStack() as ours, ExitStack() as its:
        answers, other = socket.socketpair()
        ours.enter_context(answers)
        its.enter_context(other)
        outputs = []
        for _ in range(2):
            read, write = os.pipe()
            ours.callback(os.close, read)
            its.callback(os.close, write)
            os.set_blocking(read, False)
            outputs.append((read, write))
        reads = 0 if stdin else os.open(os.devnull, os.O_RDONLY)
        if not stdin:
            its.callback(os.close, reads)
        line.settimeout(_ANSWER_S)
        socket.send_fds(line, [b"%d" % group], [other.fileno(), reads, *(write for _, write in outputs)])
        its.close()
        pid = _number(answers, 0)
        if pid == 0:
            raise ChildProcessError
        # It cannot have ended of itself: it waits for its environment.
        ended = os.pidfd_open(pid)
        ours.callback(os.close, ended)
        answers.sendall(json.dumps(dict(env)).encode())
        answers.shutdown(socket.SHUT_WR)
        ours.pop_all()
        return Forked(pid, ended, outputs[0][0], outputs[1][0], answers)


def _number(answers: socket.socket, otherwise: int) -> int:
    answers.settimeout(_ANSWER_S)
    try:
        data = answers.recv(NUMBER, socket.MSG_WAITALL)
    except OSError:
        data = b""
    return int.from_bytes(data, "big", signed=True) if len(data) == NUMBER else otherwise


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _source(argv: Sequence[str]) -> Path | None:
    """The program's file; None: nothing that can be stood by for."""
    if list(argv[:2]) != [sys.executable, "-u"] or len(argv) < 3:  # noqa: PLR2004 - interpreter, -u, program
        return None
    if argv[2] != "-m":
        files = [Path(argv[2])]
    else:
        places = [Path(folder, *argv[3].split(".")) for folder in (str(Path.cwd()), *sys.path)]
        files = [file for place in places for file in (place / "__main__.py", place.with_name(f"{place.name}.py"))]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _can_wait(source: Path) -> bool:
    """Whether it sets no variables, as some do before they import torch: those would come too late."""
    return _SETS_VARIABLES.search(source.read_bytes()) is None


def has_torch(pid: int) -> bool:
    """Whether the process has loaded torch, or is about to."""
    try:
        return _TORCH in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
