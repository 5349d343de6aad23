"""Room: the inside of an interpreter that stands by: imports ahead, forks a rank for every order.

The program finds what `python script.py` or `python -m module` would have given it: a `__main__` of its own, its
arguments, its search path, its traceback. No torch is named here: what to import ahead is the supervisor's to say.
"""

from __future__ import annotations

import array
import builtins
import gc
import importlib.util
import json
import os
import select
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from worldsize.launch import env

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

READY = b"."
NUMBER = 4
"""Bytes of a number in an answer: the process that was forked, and later how it ended. Signed, high byte first."""
FILES = 4
"""Descriptors in an order: the channel of its answers, standard input, output and errors."""

_MESSAGE = 64
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_IDLE_MS = 1000


def main(channel: int, modules: Sequence[str], argv: list[str]) -> None:
    """Import `modules`, say so on the socket `channel`, fork for each order that comes there.

    An order is the number of a process group to join, with `FILES` descriptors. The fork reads its environment from the
    channel of its answers, and is `argv` in it; it ends as the program ends. Where none comes, it returns, as the
    interpreter itself does once `channel` is closed, or at once if its imports have opened a device.
    """
    # Collecting what imports leave takes a tenth of their time, and frozen objects are pages that forks share.
    gc.disable()
    for name in modules:
        # Without it the program will say so, if it needs it.
        with suppress(ImportError):
            import_module(name)
    line = socket.socket(fileno=channel)
    order = None if _holds_device() else _Standby(line).serve()
    if order is None:
        return
    gc.enable()
    with order.answers as answers:
        data = b"".join(iter(lambda: answers.recv(1 << 16), b""))
    if data:
        env.become(json.loads(data))
        sys.orig_argv = argv
        _execute(argv[2:])


@dataclass(slots=True)
class _Order:
    group: int
    answers: socket.socket
    streams: list[int]

    def take(self) -> None:
        """In the fork: join the group, have the streams, draw other random numbers than the next fork."""
        os.setpgid(0, self.group)
        for number, descriptor in enumerate(self.streams):
            os.dup2(descriptor, number)
        self.close()
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed()  # Python's own generator is seeded anew in every fork

    def close(self) -> None:
        """Give the streams back."""
        for descriptor in self.streams:
            os.close(descriptor)


class _Standby:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._ranks: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)

    def serve(self) -> _Order | None:
        """Fork for orders and tell how the forks end. Returns the order in a fork; None when no more can come."""
        self._line.send(READY)
        if not self._poll.poll(_IDLE_MS):
            gc.collect()
        gc.freeze()
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._line.fileno():
                    self._ended(descriptor)
                    continue
                order = _received(self._line)
                if order is None or self._is_fork(order):
                    return order

    def _is_fork(self, order: _Order) -> bool:
        pid = _fork()
        if pid == 0:
            self._forget()
            order.take()
            return True
        order.close()
        if pid is None:
            order.answers.close()
            return False
        with suppress(OSError):
            os.setpgid(pid, order.group)  # whoever of the two comes first: it is done when the answer is there
        ended = os.pidfd_open(pid)
        self._ranks[ended] = pid, order.answers
        self._poll.register(ended, select.POLLIN)
        _answer(order.answers, pid)
        return False

    def _ended(self, descriptor: int) -> None:
        pid, answers = self._ranks.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _answer(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        answers.close()

    def _forget(self) -> None:
        """In a fork: close what belongs to the interpreter that stands by."""
        self._line.close()
        for descriptor, (_, answers) in self._ranks.items():
            os.close(descriptor)
            answers.close()


def _holds_device() -> bool:
    """Whether an accelerator's driver is in use: a fork of such a process cannot use it."""
    files = list(Path("/proc/self/fd").iterdir())
    # The descriptor that listed them is gone.
    return any(str(file.readlink()).startswith(_DEVICES) for file in files if file.is_symlink())


def _received(line: socket.socket) -> _Order | None:
    """The next order; None where the supervisor is gone."""
    room = socket.CMSG_SPACE(FILES * array.array("i").itemsize)
    data, extra, _, _ = line.recvmsg(_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    files = array.array("i")
    for _, _, passed in extra:
        files.frombytes(passed)
    answers, *streams = files
    return _Order(int(data), socket.socket(fileno=answers), streams)


def _fork() -> int | None:
    with warnings.catch_warnings():
        # Threads that numerical libraries keep are no danger: they are made anew in the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork()
        except OSError:
            return None


def _answer(answers: socket.socket, number: int) -> None:
    with suppress(OSError):
        answers.send(number.to_bytes(NUMBER, "big", signed=True))


def _execute(words: list[str]) -> None:
    program, code = _module(words) if words[0] == "-m" else _script(words)
    sys.modules["__main__"] = program
    try:
        exec(code, program.__dict__)  # noqa: S102 - it is the program
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - ends as the interpreter would, without this file's frame
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _script(words: list[str]) -> tuple[ModuleType, CodeType]:
    sys.argv = words
    # Python joins the two and leaves "./" and "../" as they are.
    path = words[0] if words[0].startswith("/") else f"{Path.cwd()}/{words[0]}"
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    return _main(path, SourceFileLoader("__main__", path)), code


def _module(words: list[str]) -> tuple[ModuleType, CodeType]:
    spec = importlib.util.find_spec(words[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{words[1]}.__main__")
    loader = spec.loader if spec else None
    if spec is None or spec.origin is None or not isinstance(loader, SourceFileLoader):
        raise ImportError(f"No module named {words[1]}", name=words[1])
    code = loader.get_code(spec.name)
    assert code is not None
    sys.argv = [spec.origin, *words[2:]]
    program = _main(spec.origin, loader)
    program.__spec__, program.__package__ = spec, spec.parent
    program.__dict__["__cached__"] = spec.cached
    return program, code


def _main(path: str, loader: SourceFileLoader) -> ModuleType:
    program = ModuleType("__main__")
    names = {"__file__": path, "__loader__": loader, "__builtins__": builtins, "__cached__": None}
    program.__dict__.update(names, __annotations__={})
    return program
