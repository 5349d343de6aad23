"""Room: documents as numbers in memory-mapped files, made once and kept under a key of all that they depend on. No torch.

One process makes them, whichever comes first; the others, on this and on other nodes, wait for the finished folder and watch
the maker's sign of life. No collective is open meanwhile, so none can time out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from worldsize.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_BEAT_S, _DEAD_S = 2.0, 60.0
"""How often a maker shows that it lives, and after how long without a sign another takes over."""
_POLL_S = 0.2
_SAY_S = 30.0
_SMALL = 1 << 16
_BUFFER = 1 << 20
"""Tokens that are held before they are written."""
_DONE = "tokens.json"


class Document(NamedTuple):
    """One sample.

    Attributes:
        tokens: its numbers.
        learnt: for each, whether it is to be predicted; None: all are.
        line: where it stands in its file, from 1.
    """

    tokens: Sequence[int]
    learnt: Sequence[bool] | None
    line: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Documents one after another.

    Attributes:
        values: all their tokens.
        learnt: for each, whether it is to be predicted; None: all are.
        starts: where each document begins, one more than there are documents.
        lines: the line of each in its file, from 1.
        facts: what the maker noted.
        plans: arrays that follow from them, by name.
    """

    values: NDArray[Any]
    learnt: NDArray[np.bool_] | None
    starts: NDArray[np.int64]
    lines: NDArray[np.int64]
    facts: dict[str, Any]
    plans: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each document has."""
        return np.diff(self.starts)


class Maker(Protocol):
    """Makes what is kept."""

    largest: int
    """No token is larger."""

    def documents(self) -> Iterable[Document]:
        """All of them, once."""
        ...

    def plan(self, tokens: Tokens) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What is to be noted of them, and the arrays that are to be kept with them."""
        ...


def cached(folder: Path, key: str, maker: Maker, say: Callable[[str], None]) -> Tokens:
    """The documents under this key, made where nobody has.

    Args:
        folder: of all caches, on this node or shared.
        key: of all that the tokens depend on: the data, the tokenizer, the settings.
        maker: makes them.
        say: one line for a person who waits.

    Raises:
        DataError: the folder cannot be written. What the maker raises, passes.
    """
    place = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not (place / _DONE).is_file():
            if _claimed(place):
                with _alive(place):
                    _make(place, maker)
            else:
                _wait(place, say)
    except OSError as error:
        raise DataError(
            f"tokens cannot be kept in {folder}", found=error.strerror or str(error), do="choose another cache_dir"
        ) from error
    return _opened(place)


def flat(file: Path, largest: int) -> NDArray[Any]:
    """The tokens of a file of numbers: .npy, or .bin with unsigned numbers, of 16 bits where these hold the largest token.

    Raises:
        DataError: it is neither, or holds no whole numbers.
    """
    try:
        values = np.load(file, mmap_mode="r") if file.suffix == ".npy" else np.memmap(file, _kind(largest), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} holds no tokens", found=str(error), do="write it with numpy.save") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(
            f"{file} holds no tokens",
            found=f"{values.ndim} dimensions of {values.dtype}",
            do="one row of whole numbers",
        )
    found: NDArray[Any] = values
    return found


def _claim(place: Path) -> Path:
    return place.with_name(f"{place.name}.making")


def _claimed(place: Path) -> bool:
    """Whether this process is the one that makes it."""
    claim = _claim(place)
    try:
        descriptor = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{socket.gethostname()} {os.getpid()}\n")
    if (place / _DONE).is_file():  # made between the look and the claim
        claim.unlink(missing_ok=True)
        return False
    return True


@contextmanager
def _alive(place: Path) -> Iterator[None]:
    """The claim is touched while the block runs, and gone after it."""
    claim, ended = _claim(place), threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with claim.open("a"):
                os.utime(claim)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        claim.unlink(missing_ok=True)


def _wait(place: Path, say: Callable[[str], None]) -> None:
    """Until it is made, or the maker is gone."""
    claim, said = _claim(place), time.monotonic()
    beats, seen = -1.0, time.monotonic()
    while claim.exists() and not (place / _DONE).is_file():
        time.sleep(_POLL_S)
        try:
            now, who = claim.stat().st_mtime, claim.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return
        if now != beats:
            beats, seen = now, time.monotonic()
        elif time.monotonic() - seen > _DEAD_S:
            # Its owner is dead: who renames it first may try again.
            claim.rename(claim.with_name(f"{claim.name}.{os.getpid()}")).unlink()
            return
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            say(f"waiting for {who} to make tokens")


def _make(place: Path, maker: Maker) -> None:
    beside = place.with_name(f"{place.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        said = _write(beside, maker)
        facts, plans = maker.plan(_read(beside, said))
        for name, values in plans.items():
            np.save(beside / f"plan-{name}.npy", values)
        said |= {"facts": facts, "plans": list(plans)}
        (beside / _DONE).write_text(json.dumps(said), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)  # without its last file it is nobody's
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(folder: Path, maker: Maker) -> dict[str, Any]:
    """Write documents as they come. Returns what `_read` needs."""
    kind, starts, lines, partly = _kind(maker.largest), [0], list[int](), False
    with (folder / "values").open("wb", _BUFFER) as values, (folder / "learnt").open("wb", _BUFFER) as learnt:
        for document in maker.documents():
            numbers = np.asarray(document.tokens, np.int64)
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= maker.largest:
                raise DataError(
                    "the tokenizer gives tokens that the model does not have",
                    found=f"line {document.line}: {numbers.max()}, the largest is {maker.largest}",
                    do="use the model's own tokenizer",
                )
            marks = np.ones(len(numbers), bool) if document.learnt is None else np.asarray(document.learnt, bool)
            partly = partly or not marks.all()
            values.write(numbers.astype(kind).tobytes())
            learnt.write(marks.tobytes())
            starts.append(starts[-1] + len(numbers))
            lines.append(document.line)
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    np.save(folder / "lines.npy", np.array(lines, np.int64))
    return {"dtype": kind.name, "learnt": partly}


def _opened(place: Path) -> Tokens:
    said = json.loads((place / _DONE).read_text(encoding="utf-8"))
    plans = {name: np.load(place / f"plan-{name}.npy", mmap_mode="r") for name in said["plans"]}
    return replace(_read(place, said), facts=said["facts"], plans=plans)


def _read(place: Path, said: dict[str, Any]) -> Tokens:
    learnt = _mapped(place / "learnt", np.dtype(bool)) if said["learnt"] else None
    values = _mapped(place / "values", np.dtype(said["dtype"]))
    starts, lines = (np.load(place / f"{name}.npy", mmap_mode="r") for name in ("starts", "lines"))
    return Tokens(values, learnt, starts, lines, {}, {})


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _kind(largest: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if largest < _SMALL else np.uint32)
