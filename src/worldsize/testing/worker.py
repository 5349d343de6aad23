"""Room: the other side of a `RankPool`: one process that makes call after call and sends back what came of each."""

from __future__ import annotations

import gc
import pickle
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import cloudpickle

from worldsize.runtime import env, session, signals

MEETING = "meeting"
"""The socket's name in the pool's folder."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call."""

    value: Any = None
    error: BaseException | None = None
    """None also for an exception that does not survive the journey."""
    trace: str | None = None
    """Where there was an exception: its traceback."""


def main(folder: str) -> None:
    """Serve the pool until it hangs up."""
    with Client(str(Path(folder) / MEETING)) as line:
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
    gc.collect()
    env.export({"MASTER_PORT": str(port)})


def _answer(call: bytes) -> bytes:
    try:
        fn, args = cloudpickle.loads(call)
        data: bytes = cloudpickle.dumps(Answer(fn(*args)))
    except BaseException as error:  # noqa: BLE001 - SystemExit is an outcome too
        data = _failed(error)
    return data


def _failed(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        data: bytes = cloudpickle.dumps(Answer(error=error, trace=trace))
        pickle.loads(data)  # noqa: S301 - made one line above
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        data = cloudpickle.dumps(Answer(trace=trace))
    return data
