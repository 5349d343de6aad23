"""Room: a request to stop, from outside. Handlers only set a flag; who looks at it decides what to do. No torch.

SIGTERM and SIGUSR1 are what schedulers send before they take the machine away; SIGINT is a person at the terminal,
whose second press ends the program at once.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_received: list[str] = []
_installed = False


def install() -> None:
    """Catch the stop signals from now on. Does nothing the second time, or outside the main thread."""
    global _installed  # noqa: PLW0603 - a process has one signal table
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    for number in _STOPPING:
        signal.signal(number, _note)
    _installed = True


def received() -> str | None:
    """The name of the first stop signal that came, or None."""
    return _received[0] if _received else None


def forget() -> None:
    """Treat what came so far as answered."""
    _received.clear()


def _note(number: int, _frame: FrameType | None) -> None:
    again = number == signal.SIGINT and bool(_received)
    # CAUTION: nothing but a list append here: a handler that saves or prints can deadlock in the interrupted call.
    _received.append(signal.Signals(number).name)
    if again:
        raise KeyboardInterrupt
