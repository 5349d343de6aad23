"""Room: the other side of `spawn`: one call in a fresh process, its result or its exception left in the folder."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import cloudpickle

from worldsize.launch import env


def main(folder: str) -> None:
    """Make the call that lies in `folder`. Its exception is left there too, and raised."""
    own = Path(folder) / f"rank-{int(env.read()['RANK']):04d}"
    fn, args = cloudpickle.loads((Path(folder) / "call.pkl").read_bytes())
    try:
        own.with_suffix(".result").write_bytes(cloudpickle.dumps(fn(*args)))
    except Exception as error:
        own.with_suffix(".raised").write_bytes(_portable(error))
        raise


def _portable(error: Exception) -> bytes:
    """The exception and its traceback as text; None for an exception that does not survive the journey."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        data: bytes = cloudpickle.dumps((error, trace))
        pickle.loads(data)  # noqa: S301 - made one line above
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        data = cloudpickle.dumps((None, trace))
    return data
