"""Room: the last words of a process. What failed is said once, in one line, and written where the launcher looks. No torch.

The file is torchelastic's error file (TORCHELASTIC_ERROR_FILE), so that torchrun and our own launcher read it alike.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from worldsize.errors import WorldsizeError
from worldsize.runtime import env

if TYPE_CHECKING:
    from types import TracebackType

_HERE = str(Path(__file__).resolve().parents[1])
_installed = False
_reported = False


def install() -> None:
    """From now on an uncaught exception leaves through here. Safe to call twice."""
    global _installed  # noqa: PLW0603 - a process has one hook
    if not _installed:
        sys.excepthook = _hook
        _installed = True


def reported() -> bool:
    """Whether something was reported already."""
    return _reported


def say(error: WorldsizeError, trace: TracebackType | None = None) -> None:
    """One line on stderr, and the launcher's file; only the file where our own launcher says the line itself."""
    line = f"worldsize: {_who()}{error}{_where(trace)}"
    _write(error, line, trace)
    if env.read().get("WORLDSIZE_LAUNCHER") != "worldsize":
        # CAUTION: torch wraps the hook and catches what it writes to sys.stderr; this process ends before it would show.
        print(line, file=sys.__stderr__ or sys.stderr, flush=True)


def end(error: WorldsizeError) -> NoReturn:
    """Say it, and end this process with its code."""
    say(error, error.__traceback__)
    sys.stdout.flush()
    # CAUTION: no farewell to the other ranks: they may sit in a collective that this one never joins.
    os._exit(error.exit_code)


def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook for a process whose exception is told elsewhere: only the launcher's file."""
    _write(error, f"{kind.__name__}: {error}", trace)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, WorldsizeError):
        end(error.with_traceback(trace))
    _write(error, f"{kind.__name__}: {error}", trace)
    sys.__excepthook__(kind, error, trace)


def _who() -> str:
    rank, size = env.read().get("RANK"), env.read().get("WORLD_SIZE", "1")
    return f"rank {rank} of {size} on {socket.gethostname()}: " if rank is not None and size != "1" else ""


def _where(trace: TracebackType | None) -> str:
    """The innermost line of the user's own program."""
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((_HERE, "<"))]
    own = [frame for frame in own if "site-packages" not in frame.filename]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""


def _write(error: BaseException, line: str, trace: TracebackType | None) -> None:
    global _reported  # noqa: PLW0603
    _reported = True
    path = env.read().get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(type(error), error, trace))
    facts = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    who = {"host": socket.gethostname(), "rank": env.read().get("RANK")}
    body = {
        "message": {"message": line, "extraInfo": facts},
        "time": time.time(),
        "kind": type(error).__name__,
        **who,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(body), encoding="utf-8")
