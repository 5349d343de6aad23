"""Room: interpreters that stand by for the next attempt of a node, so that a restart need not import everything again.

They are warmed one after the other, as each keeps a processor busy while it imports: lowering its priority instead
could not be taken back without privileges.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import NotStartedError
from worldsize.launch.shell import Child, Group
from worldsize.launch.standby import READY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.launch.loop import Loop

_ORDER_S = 5.0
_BOOT = (
    "import sys; sys.flags.safe_path or sys.path.__setitem__(0, sys.argv[2]); "
    "from worldsize.launch.standby import main; "
    "main(int(sys.argv[1]), sys.argv[3].split(), [*sys.orig_argv[:2], *sys.argv[4:]])"
)
_SETS_VARIABLES = re.compile(rb"\bputenv\b|\benviron\s*(?:\[[^]\n]*\]\s*=[^=]|\.\s*(?:setdefault|update|pop)\b|\|=)")
"""Ways of setting an environment variable, in the text of a program."""
_TORCH = "/libtorch_cpu."
_WITH_TORCH = ("torch", "torch._dynamo")
"""The second comes with the first optimizer, and takes almost as long as the first."""
_COMMITTING = ("worldsize.train.run", "worldsize.train.trainer")


@dataclass(slots=True)
class _Standby:
    child: Child
    line: socket.socket
    ready: bool = False


class Spares:
    """One interpreter for each rank of the next attempt, and the process group that they and this attempt form.

    Args:
        loop: tells when one is ready.
        argv: the program; only Python scripts and modules can be stood by for.
    """

    def __init__(self, loop: Loop, argv: Sequence[str]) -> None:
        self._loop, self._argv = loop, list(argv)
        self._group: Group | None = None
        self._standing: dict[int, _Standby] = {}
        self._wanted: list[tuple[int, Mapping[str, str], bool]] = []
        self._modules: tuple[str, ...] = ()
        self._first = ""

    def warm(self, like: int, ranks: Sequence[tuple[Mapping[str, str], bool]], *, commits: bool) -> None:
        """Have an interpreter ready for each of `ranks` (its environment so far, whether it reads standard input).

        Args:
            like: the number of a running process: what it has loaded is loaded ahead.
            ranks: by rank on this node.
            commits: the program reports its commits.
        """
        source = _source(self._argv)
        if self._group is None and source is not None and _can_wait(source):
            # What Python puts first on its search path.
            self._first = str(Path.cwd() if self._argv[2] == "-m" else source.resolve().parent)
            self._group = Group()
            self._modules = _loaded(like, commits=commits)
            self._wanted = [(number, *each) for number, each in enumerate(ranks)]
            self._next()

    def take(self) -> Group:
        """The process group for the attempt that begins now, with the ready ones in it; the others end."""
        group, self._group = self._group or Group(), None
        self._wanted.clear()
        for number, standby in list(self._standing.items()):
            self._loop.unwatch(standby.line.fileno())
            if not standby.ready:
                self._drop(number)
        return group

    def order(self, local_rank: int, env: Mapping[str, str]) -> Child | None:
        """Let the one for `local_rank` become the program, with exactly `env`; None where none is ready."""
        standby = self._standing.pop(local_rank, None)
        if standby is None:
            return None
        with standby.line as line:
            line.settimeout(_ORDER_S)
            try:
                line.sendall(json.dumps(dict(env)).encode())
            except OSError:
                standby.child.kill()
                standby.child.close()
                return None
        return standby.child

    def close(self) -> None:
        """End them all."""
        self._wanted.clear()
        for number in list(self._standing):
            self._drop(number)
        if self._group is not None:
            self._group.close()

    def _next(self) -> None:
        if not self._wanted or self._group is None:
            return
        number, env, stdin = self._wanted.pop(0)
        ours, its = socket.socketpair()
        words = (*self._argv[:2], "-c", _BOOT, str(its.fileno()), self._first, " ".join(self._modules))
        words = (*words, *self._argv[2:])  # so that a list of processes shows whose they are
        with its:
            try:
                child = self._group.start(words, env, stdin=stdin, keep=(its.fileno(),))
            except NotStartedError:
                ours.close()
                return
        self._standing[number] = _Standby(child, ours)
        self._loop.watch(ours.fileno(), lambda: self._heard(number))

    def _heard(self, number: int) -> None:
        standby = self._standing[number]
        self._loop.unwatch(standby.line.fileno())
        standby.ready = standby.line.recv(1) == READY
        if standby.ready:
            self._next()
        else:
            self._drop(number)

    def _drop(self, number: int) -> None:
        standby = self._standing.pop(number)
        self._loop.unwatch(standby.line.fileno())
        standby.line.close()
        standby.child.kill()
        standby.child.close()


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


def _loaded(pid: int, *, commits: bool) -> tuple[str, ...]:
    """The slow modules that the process has loaded, as far as it shows from outside."""
    try:
        torch = _TORCH in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        torch = False
    return (*(_WITH_TORCH if torch else ()), *(_COMMITTING if torch and commits else ()))
