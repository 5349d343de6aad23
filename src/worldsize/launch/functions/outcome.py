"""Room: what came of a call on each rank, left in the job's folder by the rank and read where the job was submitted.

A rank leaves facts (JSON) and a value or an exception (a pickle, `vault`). What decides about the root cause is when each rank
failed and whether it only reports that a peer is gone.
"""

from __future__ import annotations

import json
import pickle
import time
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from worldsize.errors import LaunchError
from worldsize.launch import failure
from worldsize.launch.functions import vault
from worldsize.launch.functions.here import place
from worldsize.launch.spawned import portable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from worldsize.launch.functions.here import Here

FACTS, VALUE = ".json", ".pkl"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one rank.

    Attributes:
        rank, world, host: who.
        time: when, in seconds since 1970.
        raised: what failed, in one line; None: it returned.
        where: at which line of the program.
        follows: it only says that a peer is gone.
        trace: the traceback as text.
        note: why the value or the exception is not there.
    """

    rank: int
    world: int
    host: str
    time: float
    raised: str | None = None
    where: str | None = None
    follows: bool = False
    trace: str = ""
    note: str | None = None
    file: str = ""

    @property
    def who(self) -> str:
        """In words."""
        where = f" ({self.where})" if self.where else ""
        return f"rank {self.rank} of {self.world} on {self.host}{where}"


def returned(here: Here, value: Any, *, by_name: bool) -> None:
    """Leave the value that this rank's call returned."""
    note = None
    try:
        _leave(here, value, by_name=by_name)
    except Exception as error:  # noqa: BLE001 - pickling runs the user's code
        note = f"a {type(value).__module__}.{type(value).__qualname__} cannot be pickled: {error}"
    _tell(here, Outcome(here.rank, here.world, here.host, time.time(), note=note))


def raised(here: Here, error: BaseException, *, by_name: bool) -> None:
    """Leave the exception that ended this rank's call."""
    when, (sent, trace) = time.time(), portable(error)
    note = None
    if isinstance(error, SystemExit):
        # Raised again where the result is asked for, it would end that program.
        note = f"the function called sys.exit({error.code!r})"
    elif sent is None:
        note = "the exception cannot be sent"
    else:
        _leave(here, sent, by_name=by_name)
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    cause = failure.from_traceback("".join([*traceback.format_tb(error.__traceback__), "Error: here"]))
    # An OSError is the program's own connection: those of ranks come as RuntimeError from torch.
    follows = failure.follows(words) and not isinstance(error, OSError)
    where = cause.where if cause else None
    _tell(here, Outcome(here.rank, here.world, here.host, when, words, where, follows, trace, note))


def _leave(here: Here, value: Any, *, by_name: bool) -> None:
    """A script that is run again has the submitter's classes under the same names; else they travel by value."""
    data = None
    if by_name:
        try:
            data = pickle.dumps(value)
        except Exception:  # noqa: BLE001 - as above
            data = None
    vault.put(here.folder / f"{here.own}{VALUE}", cloudpickle.dumps(value) if data is None else data)


def _tell(here: Here, outcome: Outcome) -> None:
    vault.put(here.folder / f"{here.own}{FACTS}", json.dumps(asdict(outcome)).encode())


def read(folder: Path, job: str, attempt: int | None = None) -> list[Outcome]:
    """What the ranks of the newest attempt left, by rank.

    Args:
        folder: the job's.
        job: its id.
        attempt: Slurm's count of restarts, where it is known: older ones do not count then.
    """
    base = folder / place(job)
    tries = [_numbers(entry.name) for entry in base.iterdir()] if base.is_dir() else []
    tries = [numbers for numbers in tries if attempt is None or numbers[0] == attempt]
    if not tries:
        return []
    newest = "{}-{}".format(*max(tries))
    names = [entry.name for entry in (base / newest).iterdir() if entry.name.endswith(FACTS) and entry.name[0] != "."]
    found = []
    for name in names:
        path = f"{place(job)}/{newest}/{name}"
        values = json.loads(vault.get(folder, path)) | {"file": path.removesuffix(FACTS)}
        found.append(Outcome(**values))
    return sorted(found, key=lambda outcome: (outcome.rank, outcome.time))


def root(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The failure that the others followed from: the earliest that is not about a peer."""
    failed = [outcome for outcome in outcomes if outcome.raised]
    return min(failed, key=lambda outcome: (outcome.follows, outcome.time), default=None)


def value(folder: Path, outcome: Outcome) -> Any:
    """What this rank returned.

    Raises:
        LaunchError: it could not be pickled there, or cannot be unpickled here.
    """
    if outcome.note:
        raise LaunchError(
            f"the result of {outcome.who} did not come back",
            found=outcome.note,
            do="return something plainer; the job's output is kept",
        )
    return _loaded(folder, outcome, f"the result of {outcome.who}")


def error(folder: Path, outcome: Outcome) -> BaseException:
    """The exception that this rank raised, with where and the remote traceback as a note; its words where it cannot come."""
    found: Any = None
    try:
        found = None if outcome.note else _loaded(folder, outcome, "the exception")
    except LaunchError as reason:
        found = LaunchError(f"{outcome.raised} ({outcome.who})", found=str(reason))
    if not isinstance(found, BaseException):
        found = LaunchError(f"{outcome.raised} ({outcome.who}; {outcome.note})")
    assert isinstance(found, BaseException)
    found.add_note(f"\nOn {outcome.who}:\n{outcome.trace}")
    return found


def _loaded(folder: Path, outcome: Outcome, what: str) -> Any:
    data = vault.get(folder, f"{outcome.file}{VALUE}")
    load: Callable[[bytes], Any] = pickle.loads
    try:
        return load(data)
    except Exception as error:
        raise LaunchError(
            f"{what} cannot be loaded here", found=f"{type(error).__name__}: {error}", do="import what it needs first"
        ) from error


def _numbers(name: str) -> tuple[int, int]:
    attempt, _, restart = name.partition("-")
    return int(attempt), int(restart)
