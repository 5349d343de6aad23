"""Room: the program that a job's ranks run: one call out of the job's folder, and what comes of it left there."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle

from worldsize.errors import EXIT_STOPPED, LaunchError
from worldsize.launch.functions import here, outcome, vault
from worldsize.launch.functions.bundle import Wrapped
from worldsize.runtime import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from worldsize.launch.functions.here import Here

PATHS = "paths.json"


def calls(member: int) -> str:
    """The file of one call, below the job's folder."""
    return f"call-{member}.pkl"


def make(
    rank: Here, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], *, by_name: bool
) -> Any:
    """Call, leave what comes of it, and give it on."""
    try:
        with here.running():
            value = function(*args, **named)
    except SystemExit as end:
        if end.code in (0, None):
            outcome.returned(rank, None, by_name=by_name)
        elif end.code != EXIT_STOPPED:
            outcome.raised(rank, end, by_name=by_name)
        raise
    except Exception as error:
        outcome.raised(rank, error, by_name=by_name)
        raise
    outcome.returned(rank, value, by_name=by_name)
    return value


def main() -> None:
    """Make the call of this job."""
    rank = here.find()
    if rank is None:
        raise LaunchError("this is no job of a function", do="submit one: main[config](...)")
    failure.install()
    _paths(rank.folder)
    call = vault.get(rank.folder, calls(rank.member))
    try:
        made, (args, named) = cloudpickle.loads(call)
    except Exception as error:
        outcome.raised(rank, error, by_name=False)
        raise
    make(rank, made.function if isinstance(made, Wrapped) else made, args, named, by_name=False)


def _paths(folder: Path) -> None:
    """What the submitter imports from; of another interpreter's path only what is the user's own."""
    known = json.loads(vault.get(folder, PATHS))
    if known["prefix"] == sys.prefix:
        sys.path[:] = known["path"]
    else:
        sys.path[:0] = [path for path in known["path"] if not path.startswith((known["prefix"], known["base"]))]
    sys.argv[:] = known["argv"]


if __name__ == "__main__":
    main()
