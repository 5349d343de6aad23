"""Room: waiting for several things at once: descriptors, signals, points in time. Never sleeps, starts no threads."""

from __future__ import annotations

import heapq
import selectors
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WRITE = selectors.EVENT_WRITE


@dataclass(order=True, slots=True)
class Timer:
    """A call that is due at a time of the monotonic clock."""

    due: float
    number: int
    call: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class Loop:
    """Calls back when something happens. One thread; callbacks never block."""

    def __init__(self) -> None:
        self._selector = (
            selectors.PollSelector()
        )  # unlike epoll, takes regular files: a log may stand in for a terminal
        self._timers: list[Timer] = []
        self._made = 0

    def watch(self, descriptor: int, call: Callable[[], None], *, write: bool = False) -> None:
        """Call whenever `descriptor` can be read (or written) without blocking, until `unwatch`."""
        self._selector.register(descriptor, _WRITE if write else selectors.EVENT_READ, call)

    def unwatch(self, descriptor: int) -> None:
        """Call no longer. Harmless where nothing is watched."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def later(self, delay: float, call: Callable[[], None]) -> Timer:
        """Call once, `delay` seconds from now."""
        self._made += 1
        timer = Timer(time.monotonic() + delay, self._made, call)
        heapq.heappush(self._timers, timer)
        return timer

    def run(self, done: Callable[[], bool]) -> None:
        """Serve until `done()`, which is asked after every round of calls."""
        while not done():
            for key, _ in self._selector.select(self._wait()):
                # An earlier call of this round may have ended the watch.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            while self._timers and self._timers[0].due <= time.monotonic():
                call = heapq.heappop(self._timers).call
                if call is not None:
                    call()

    def close(self) -> None:
        """Give the descriptor back."""
        self._selector.close()

    @contextmanager
    def signals(self, numbers: tuple[int, ...], call: Callable[[int], None]) -> Iterator[None]:
        """Give signals to `call` for the length of the block. Those that are ignored (nohup) stay so.

        Outside the main thread, where Python hands out no signals, nothing is caught.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = {n: before for n in numbers if (before := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
        inside, outside = socket.socketpair()
        inside.settimeout(0)
        outside.settimeout(0)
        wakeup = signal.set_wakeup_fd(outside.fileno(), warn_on_full_buffer=False)

        def arrived() -> None:
            for number in inside.recv(4096):
                if number in caught:
                    call(number)

        self.watch(inside.fileno(), arrived)
        try:
            for number in caught:
                signal.signal(number, lambda _number, _frame: None)
            yield
        finally:
            for number, before in caught.items():
                signal.signal(number, before)
            signal.set_wakeup_fd(wakeup)
            self.unwatch(inside.fileno())
            inside.close()
            outside.close()

    def _wait(self) -> float | None:
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        return max(self._timers[0].due - time.monotonic(), 0.0) if self._timers else None
