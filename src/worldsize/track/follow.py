"""Room: a library beside a training: one thread reads the run folder's own file and hands its rows over.

So nothing waits for a library and nothing is dropped: what it has not taken stays in the file, for its next try or for
the next attempt.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from worldsize.errors import ConfigError, MissingExtraError, TrackError
from worldsize.runtime import failure
from worldsize.track import rows, spec
from worldsize.track.base import Training
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from worldsize.track.base import Library, Row, Status
    from worldsize.track.spec import Track


_EVERY = 1.0
_OPENING, _OPENING_REQUIRED = 30.0, 120.0
"""Seconds that a training waits at its start: most libraries are open by then, and no import meets a fork of ours."""
_PATIENCE = 60.0
"""Seconds that a required one may fail in a row."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 300.0
_FINISHING, _LEAVING = 30.0, 5.0
"""Seconds for what is left at the end; and where other ranks or a scheduler wait for this process to end."""
_LINE = 300


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """What a follower needs of the run folder.

    Attributes:
        folder: the run folder.
        id: the run's.
        attempt: this one's number.
        ids: what the library said before.
        keep: takes what it says now.
        say: one line for a person.
    """

    folder: Path
    id: str
    attempt: int
    ids: Mapping[str, str]
    keep: Callable[[Mapping[str, str]], None]
    say: Callable[[str], None]


class Follower:
    """A tracker that hands everything to a library, in its own time.

    Args:
        track: which, and how.
        place: where the numbers are, in the files of `JsonLines`.
    """

    def __init__(self, track: Track, place: Place) -> None:
        self._track, self._place = track, place
        self._thread = threading.Thread(target=self._work, name=f"track {track.name}", daemon=True)
        self._wake, self._settled, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._training: Training | None = None
        self._committed, self._logged, self._through = 0, 0, 0
        self._end: tuple[Status, str] = ("finished", "finished")
        self._left = self._told = False
        self._error: Exception | None = None
        self._since = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing: the numbers are in the file.

        Raises:
            TrackError: it is required, and has failed for a minute.
        """
        del values
        self._logged = max(self._logged, step + 1)
        if self._track.required and self._error is not None and time.monotonic() - self._since > _PATIENCE:
            raise self._refusal(self._error)

    def event(self, kind: str, /, **facts: Any) -> None:
        """Begin at the first; learn from others what is committed, and how it ends.

        Raises:
            TrackError, MissingExtraError, ConfigError: it is required and cannot be opened.
        """
        if kind in ("start", "resume"):
            self._begin(facts)
        if kind == "save":
            self._committed = max(self._committed, facts["step"])
            self._wake.set()
        if kind in ("stop", "end"):
            status: Status = "stopped" if kind == "stop" else "finished"
            self._end = status, f"{status} at step {facts['step']} ({facts['reason']})"

    def close(self) -> None:
        """Hand over what is left, for so long; say what was not taken."""
        self._finish(_FINISHING if self._settled.is_set() and self._end[0] == "finished" else _LEAVING)

    def _begin(self, facts: Mapping[str, Any]) -> None:
        self._committed = self._logged = facts["step"]
        self._training = _training(self._place, facts)
        failure.before_end(self._fail)
        atexit.register(self._exit)
        self._thread.start()
        limit = _OPENING_REQUIRED if self._track.required else _OPENING
        if not self._settled.wait(limit):
            self._note(TimeoutError(f"no answer within {limit:g} s"))
        if self._track.required and self._error is not None:
            self._left = True
            raise self._refusal(self._error)

    def _fail(self, line: str) -> None:
        self._end = "failed", line
        self._finish(_LEAVING)

    def _exit(self) -> None:
        """The interpreter ends, and nobody has closed the run."""
        self._fail("left before its end")

    def _finish(self, limit: float) -> None:
        failure.forget(self._fail)
        atexit.unregister(self._exit)
        if self._closing.is_set() or self._training is None:
            return
        self._closing.set()
        self._wake.set()
        self._thread.join(limit)
        late, self._left = self._thread.is_alive(), True
        whole = min(self._committed, self._logged)
        if self._through < whole or late:
            self._say(
                f"did not take steps {self._through} to {whole - 1}{f' within {limit:g} s' if late else ''}: they are in "
                "metrics.jsonl, and are sent when the run is started again"
            )

    def _work(self) -> None:
        library = self._insist(self._open)
        if library is None:
            return
        tail = rows.Tail(self._place.folder, library.through, self._place.attempt, rewinds=library.rewinds)
        ready = partial(self._ready, rewinds=library.rewinds)
        while True:
            last = self._closing.is_set()
            while found := tail.take(ready, self._whole):
                if tail.back is not None:
                    library, tail.back = self._insist(partial(self._open, tail.back)), None
                if library is None or self._insist(partial(_hand, library, found)) is None:
                    return
                self._through = tail.through
            if last:
                break
            self._wake.wait(_EVERY)
            self._wake.clear()
        self._insist(lambda: library.close(*self._end))

    def _open(self, step: int | None = None) -> Library:
        assert self._training is not None
        training = self._training if step is None else replace(self._training, step=step)
        library = spec.start(self._track, training)
        self._through = library.through
        if dict(library.ids) != dict(self._place.ids):
            self._place.keep(library.ids)
        self._settled.set()
        return library

    @property
    def _whole(self) -> float:
        return math.inf if self._closing.is_set() else self._committed

    def _ready(self, row: Row, *, rewinds: bool) -> bool:
        """Whether a row may go: nothing will take it back, or the library can, or it has waited long enough."""
        return row.step < self._committed or rewinds or time.time() - row.time > self._track.hold

    def _insist(self, act: Callable[[], T]) -> T | None:
        """Do it, again after errors; None where that is given up: nothing changes by itself, or the run ends."""
        pause = _FIRST_PAUSE
        while not self._left:
            try:
                found = act()
            except Exception as error:  # noqa: BLE001 - what a library does wrong must not end a training
                self._note(error)
                if isinstance(error, MissingExtraError | ConfigError) or self._closing.wait(pause):
                    return None
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._error = None
                return found
        return None

    def _note(self, error: Exception) -> None:
        """Remember it; say the first."""
        self._since = self._since if self._error is not None else time.monotonic()
        self._error = error
        if not (self._told or self._track.required):
            self._told = True
            self._say(f"{_brief(error)}; training goes on, and what it misses is sent when it works again")
        self._settled.set()

    def _refusal(self, error: Exception) -> Exception:
        if isinstance(error, MissingExtraError | ConfigError):
            return error
        return TrackError(
            f"tracker {self._track.name!r} is required and fails",
            found=_brief(error),
            do="see to it and start again, or track without required",
        )

    def _say(self, words: str) -> None:
        self._place.say(f"worldsize: tracker {self._track.name}: {words}")


def _hand(library: Library, found: list[Row]) -> bool:
    library.log(found)
    return True


_ABOUT = ("ranks", "hosts", "devices", "launcher", "layout", "command", "job", "code")


def _training(place: Place, facts: Mapping[str, Any]) -> Training:
    about = {name: facts[name] for name in _ABOUT if name in facts}
    return Training(
        folder=place.folder.absolute(),
        id=place.id,
        attempt=place.attempt,
        step=facts["step"],
        config=facts.get("config", {}),
        environment={**facts.get("environment", {}), **about},
        ended=rows.ended(read(place.folder / "events.jsonl"), place.attempt),
        ids=place.ids,
    )


def _brief(error: Exception) -> str:
    text = str(error) if isinstance(error, MissingExtraError | ConfigError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_LINE]
