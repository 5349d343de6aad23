"""Room: a request to stop, from outside. Handlers only set a flag; who looks at it decides what to do. No torch.

SIGTERM and SIGUSR1 are what schedulers send before they take the machine away; SIGINT is a person at the terminal,
whose second press ends the program at once.

Before there is a Run nothing can be lost, so a stop ends the process at once, as it ends any program; but a program of
ours leaves with code 75, which says that it may be started again. Only under our own launcher and in our own jobs,
which ask all ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_STOPPED
from worldsize.runtime import env, exits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

END_TIME = "WORLDSIZE_END_TIME"
"""Seconds since 1970; batch scripts set it."""

_EARLY = (signal.SIGTERM, signal.SIGUSR1)
_STOPPING = (*_EARLY, signal.SIGINT)
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


def expect() -> None:
    """This program is about to make a Run: until it has one, a stop leaves with code 75.

    Does nothing outside the main thread or our launcher and jobs, nor to a signal that the program treats in its own way.
    """
    if _installed or not _launched() or threading.current_thread() is not threading.main_thread():
        return
    for number in _EARLY:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _leave)


@contextmanager
def leaving() -> Iterator[None]:
    """In this block a stop ends the process with code 75 even while it waits in native code, where no handler runs.

    So no rank waits for others that have left already.
    """
    if not _launched() or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside, outside = socket.socketpair()
    outside.settimeout(0)
    before = signal.set_wakeup_fd(outside.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(inside,), daemon=True)
    watcher.start()
    try:
        if _received:
            _leave()
        yield
    finally:
        signal.set_wakeup_fd(before)
        outside.close()
        watcher.join()
        inside.close()


@contextmanager
def held() -> Iterator[None]:
    """In this block stop signals wait; in processes that are started in it, until they call `pass_by`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pass_by() -> None:
    """Stop signals do nothing in this process from now on: the rank that started it gets them too, and decides."""
    for number in _STOPPING:
        # Not SIG_IGN: programs that this process starts would inherit that.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # noqa: FBT003 - it has no names
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def received() -> str | None:
    """The name of the first stop signal that came, or None."""
    return _received[0] if _received else None


def end_time() -> float | None:
    """When the scheduler ends this job by force, seconds since 1970, where it says that."""
    end = env.read().get(END_TIME, "")
    return float(end) if end.isascii() and end.isdigit() else None


def forget() -> None:
    """Treat what came so far as answered."""
    _received.clear()


def _note(number: int, _frame: FrameType | None) -> None:
    again = number == signal.SIGINT and bool(_received)
    # CAUTION: nothing but a list append here: a handler that saves or prints can deadlock in the interrupted call.
    _received.append(signal.Signals(number).name)
    if again:
        raise KeyboardInterrupt


def _launched() -> bool:
    return env.read().get(env.SWITCH) == "worldsize" or exits.expected()


def _leave(_number: int = 0, _frame: FrameType | None = None) -> None:
    exits.stopped(0)
    os._exit(EXIT_STOPPED)


def _watch(inside: socket.socket) -> None:
    """Python writes the number of each signal there, whatever the main thread does. Ends when the other end closes."""
    while data := inside.recv(64):
        if any(number in _STOPPING for number in data):
            _leave()
