"""Room: the other side of `spawn`: one call in a fresh process, its result or its exception left in the folder."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import cloudpickle

from worldsize.launch import env
from worldsize.runtime import failure

if TYPE_CHECKING:
    from collections.abc import Callable


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # has no annotations
    """Keeps the file names of code, so that a traceback over there says where."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is CodeType:
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        return super().reducer_override(obj)


def _code(filename: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=filename)


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call for `main` to make."""
    packed = io.BytesIO()
    _Pickler(packed).dump((fn, args))
    return packed.getvalue()


def main(folder: str) -> None:
    """Make the call that lies in `folder`. Its exception is left there too, and ends the process without a word."""
    own = Path(folder) / f"rank-{int(env.read()['RANK']):04d}"
    fn, args = cloudpickle.loads((Path(folder) / "call.pkl").read_bytes())
    try:
        own.with_suffix(".result").write_bytes(cloudpickle.dumps(fn(*args)))
    except Exception as error:
        own.with_suffix(".raised").write_bytes(cloudpickle.dumps(portable(error)))
        # The caller raises it again: a traceback from here would say it twice.
        sys.excepthook = failure.leave
        raise


def portable(error: BaseException) -> tuple[BaseException | None, str]:
    """What can be sent of an exception: itself, and its traceback as text without the words that it says itself.

    None and the whole text for one that does not survive the journey. What a run knows of it goes along as a note.
    """
    if (told := failure.explained(error)) is not None:
        error.add_note(f"worldsize: {told}")
    whole = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(cloudpickle.dumps(error))  # noqa: S301 - made on this line
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        return None, whole
    return error, whole.removesuffix("".join(traceback.format_exception_only(error)).rstrip()).rstrip()
