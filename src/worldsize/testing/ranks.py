"""Room: a function on n real gloo ranks of this machine, once or again and again in the same processes."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection, Listener, wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

import cloudpickle

from worldsize.errors import LaunchError
from worldsize.launch import ports
from worldsize.launch.scratch import Scratch
from worldsize.testing.nursery import SOCKET, Crew, accept, log_file, tail
from worldsize.testing.worker import Answer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

T = TypeVar("T")
_MOMENT = 0.5


def run_ranks(fn: Callable[..., T], size: int, *args: Any, timeout: float = 120.0, **named: Any) -> list[T]:
    """Call `fn(*args)` on `size` fresh gloo ranks and return the results by rank.

    Args:
        fn: a function that may use a `Run` or `worldsize.runtime.session`; pickled by name where it has one.
        size: how many ranks.
        *args: its arguments, equal for all ranks.
        timeout: seconds for the call.
        **named: further arguments of it.

    Raises:
        BaseException: that of the rank that failed first, its remote traceback as a note.
        LaunchError: a rank died, or the time is over; with the end of what it printed.
    """
    with RankPool(size) as pool:
        return pool.run(fn, *args, timeout=timeout, **named)


class RankPool:
    """`size` processes that run one function after another, each time in a world opened anew.

    Args:
        size: how many ranks.
        options: further environment variables of the ranks.
    """

    def __init__(self, size: int, options: Mapping[str, str] | None = None) -> None:
        self.size, self._options = size, options
        self._scratch: Scratch | None = None
        self._crew: Crew | None = None
        self._lines: list[Connection] = []

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 120.0, **named: Any) -> list[T]:
        """See `run_ranks`. After an error the processes are started anew by the next call."""
        if not self._lines:
            self._start()
        port = ports.reserve()
        try:
            for line in self._lines:
                line.send((port.getsockname()[1], cloudpickle.dumps((fn, args, named))))
            return self._results(timeout)
        except BaseException:
            self.close()
            raise
        finally:
            port.close()

    @property
    def pids(self) -> list[int]:
        """The processes by rank, as far as they are started."""
        return list(self._crew.pids) if self._crew is not None else []

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for line in self._lines:
            line.close()
        self._lines = []
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._scratch = Scratch("ranks")
        folder = self._scratch.path
        self._crew = Crew(self.size, folder, self._options)
        with Listener(str(folder / SOCKET)) as listener:
            self._crew.start(serve, str(folder))
            self._lines = accept(listener, self.size, lambda rank: tail(log_file(folder, rank)))

    def _results(self, timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        found: dict[int, Any] = {}
        while len(found) < self.size:
            waiting = [line for rank, line in enumerate(self._lines) if rank not in found]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(found))
                raise self._lost(missing[0], f"has no result after {timeout:.0f} s, nor have {missing[1:]}")
            for rank, line in enumerate(self._lines):
                if line in ready:
                    found[rank] = self._value(rank)
        return [found[rank] for rank in range(self.size)]

    def _value(self, rank: int) -> Any:
        try:
            answer: Answer = cloudpickle.loads(self._lines[rank].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._lost(rank, "died") from None
        if answer.trace is None:
            return answer.value
        error = answer.error or LaunchError(f"rank {rank} of {self.size} failed; its exception cannot be sent here")
        error.add_note(f"\nOn rank {rank} of {self.size}:\n{answer.trace}")
        raise self._dead() or error

    def _dead(self) -> LaunchError | None:
        """A rank that died explains what the others raise about it, and may show a moment later than they do."""
        for line in wait(self._lines, _MOMENT):
            try:
                line.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                return self._lost(self._lines.index(line), "died")  # type: ignore[arg-type]
        return None

    def _lost(self, rank: int, how: str) -> LaunchError:
        assert self._scratch is not None
        return LaunchError(f"rank {rank} of {self.size} {how}", found=tail(log_file(self._scratch.path, rank)))
