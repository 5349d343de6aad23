"""Room: the other side of a nursery and of a `RankPool`: what forks, and what makes call after call."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from worldsize.launch.spawned import portable
from worldsize.runtime import env, session, signals

if TYPE_CHECKING:
    from worldsize.testing.nursery import Birth

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call."""

    value: Any = None
    error: BaseException | None = None
    """None also for an exception that does not survive the journey."""
    trace: str | None = None
    """Where there was an exception: its traceback."""


def nurse(folder: str) -> None:
    """Import what takes long, then fork on request until the other side hangs up."""
    import worldsize.strategies.ddp
    import worldsize.strategies.fsdp
    import worldsize.train.trainer  # noqa: F401 - for the children

    gc.freeze()
    with Client(str(Path(folder) / "socket")) as line:
        line.send(0)
        while True:
            try:
                asked: Birth | int = line.recv()
            except EOFError:
                return
            if isinstance(asked, int):
                line.send(_code(asked))
            elif pid := os.fork():
                os.setpgid(pid, asked.group or pid)
                line.send(pid)
            else:
                _live(asked)


def _code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _live(birth: Birth) -> None:
    """The whole life of a forked process, to its exit code as python would give it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, birth.group)
    log = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    env.export(birth.env)
    code = 0
    try:
        fn, args, named = cloudpickle.loads(birth.call)
        fn(*args, **named)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its end
        sys.last_exc, code = error, 1  # type: ignore[attr-defined] # from 3.12 on
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()  # noqa: SLF001 - os._exit, which a fork must end with, would leave them out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(folder: str) -> None:
    """Serve a pool until it hangs up."""
    with Client(str(Path(folder) / "socket")) as line:
        line.send(int(env.read()["RANK"]))
        while True:
            try:
                port, call = line.recv()
            except EOFError:
                return
            _renew(port)
            line.send_bytes(_answer(call))


def _renew(port: int) -> None:
    """Leave the last call's world: only now, since the other ranks may have been in it until all had answered."""
    session.close()
    signals.forget()
    if "torch.distributed.tensor" in sys.modules:
        # Torch remembers how sharded tensors move, with the groups of the world that was left.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    gc.collect()
    env.export({"MASTER_PORT": str(port)})


def _answer(call: bytes) -> bytes:
    try:
        fn, args, named = cloudpickle.loads(call)
        data: bytes = cloudpickle.dumps(Answer(fn(*args, **named)))
    except BaseException as error:  # noqa: BLE001 - SystemExit is an outcome too
        sent, trace = portable(error)
        data = cloudpickle.dumps(Answer(error=sent, trace=trace))
    return data
