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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from worldsize.errors import WorldsizeError
from worldsize.runtime import env

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_HERE = str(Path(__file__).resolve().parents[1])
_installed = False
_reported = False
_listener: Callable[[dict[str, object]], None] | None = None
_explanation: Callable[[BaseException], WorldsizeError | None] | None = None
_farewells: list[Callable[[str], None]] = []


def install() -> None:
    """From now on an uncaught exception leaves through here. Safe to call twice."""
    global _installed  # noqa: PLW0603 - a process has one hook
    if not _installed:
        sys.excepthook = _hook
        _installed = True


def note(listener: Callable[[dict[str, object]], None] | None) -> None:
    """Who else is told of an exception that ends this process: its facts; nobody any more where None."""
    global _listener  # noqa: PLW0603 - a process has one run at a time
    _listener = listener


def explain(explanation: Callable[[BaseException], WorldsizeError | None] | None) -> None:
    """Who knows more of an exception than it says itself, and gives an error in its place; nobody any more where None."""
    global _explanation  # noqa: PLW0603 - as above
    _explanation = explanation


def explained(error: BaseException) -> WorldsizeError | None:
    """The error in its place, where there is one."""
    return None if _explanation is None or isinstance(error, WorldsizeError) else _explanation(error)


def before_end(farewell: Callable[[str], None]) -> None:
    """Call this with the line, after it was said, before an exception ends this process. The launcher waits for it."""
    _farewells.append(farewell)


def forget(farewell: Callable[[str], None]) -> None:
    """Do not call it any more."""
    with suppress(ValueError):
        _farewells.remove(farewell)


def reported() -> bool:
    """Whether something was reported already."""
    return _reported


def say(error: WorldsizeError, trace: TracebackType | None = None) -> None:
    """One line on stderr, and the launcher's file; only the file where our own launcher says the line itself."""
    line = f"worldsize: {_who()}{error}{_where(trace)}"
    _aloud(line)
    _write(error, line, trace)
    _part(line)


def say_for(error: WorldsizeError, rank: int, path: str | None) -> None:
    """The same for another rank of this host, which cannot say it: `path` is the file that its launcher looks at."""
    line = f"worldsize: {error}"
    _aloud(line)
    if path:
        _leave(Path(path), error, line, None, str(rank))


def _aloud(line: str) -> None:
    """One write, so that no other thread's line comes between it and its end; nothing where our own launcher says it."""
    # CAUTION: torch wraps the hook and catches what it writes to sys.stderr; this process ends before it would show.
    stream = sys.__stderr__ or sys.stderr
    if stream is None or env.read().get("WORLDSIZE_LAUNCHER") == "worldsize":
        return
    with suppress(OSError, ValueError):
        stream.write(line + "\n")
        stream.flush()


def end(error: WorldsizeError) -> NoReturn:
    """Say it, and end this process with its code, whatever cannot be written."""
    try:
        say(error, error.__traceback__)
        sys.stdout.flush()
    finally:
        # CAUTION: no farewell to the other ranks: they may sit in a collective that this one never joins.
        os._exit(error.exit_code)


def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook for a process whose exception is told elsewhere: only the launcher's file."""
    _write(error, f"{kind.__name__}: {error}", trace)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, WorldsizeError):
        end(error.with_traceback(trace))
    if (told := explained(error)) is not None:
        end(told.with_traceback(trace))
    sys.__excepthook__(kind, error, trace)
    _write(error, f"{kind.__name__}: {error}", trace)
    _part(f"{kind.__name__}: {error}")


def _part(line: str) -> None:
    for farewell in tuple(_farewells):
        farewell(line)


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
    if _listener is not None and env.read().get("WORLDSIZE_LAUNCHER") != "worldsize":
        # Our own launcher tells it, of all ranks the one that was first.
        rank, host = int(env.read().get("RANK", 0)), socket.gethostname()
        with suppress(OSError, ValueError):
            _listener({"line": line, "kind": type(error).__name__, "host": host, "rank": rank})
    path = env.read().get("TORCHELASTIC_ERROR_FILE")
    if path:
        _leave(Path(path), error, line, trace, env.read().get("RANK"))


def _leave(path: Path, error: BaseException, line: str, trace: TracebackType | None, rank: str | None) -> None:
    stack = "".join(traceback.format_exception(type(error), error, trace))
    facts = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    body = {
        "message": {"message": line, "extraInfo": facts},
        "time": time.time(),
        "kind": type(error).__name__,
        "host": socket.gethostname(),
        "rank": rank,
    }
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_text(json.dumps(body), encoding="utf-8")
        except OSError:
            # Torchrun starts nothing again over half a file; without one it tells the exit code.
            if path.is_file():
                path.unlink()
