"""Room: how a program that keeps its own checkpoints talks with its launcher. No torch.

`committed` tells that progress is safe: a supervisor restarts such a program only while that grows. `stop_requested`
tells that the machine is about to be taken away.
"""

from __future__ import annotations

import os
from pathlib import Path

from worldsize.errors import ConfigError
from worldsize.runtime import exits, signals

COMMIT_FILE = "WORLDSIZE_COMMIT_FILE"


def committed(path: str | os.PathLike[str], step: int) -> None:
    """Say that everything up to `step` (optimizer steps, or any count that grows) is safe in `path`.

    One rank says it once per checkpoint, after the checkpoint is whole. Without a launcher nothing happens.

    Raises:
        ConfigError: `step` is negative, or the path has a line break.
    """
    text = os.fspath(path)
    if step < 0 or "\n" in text:
        raise ConfigError("a commit is a step of at least 0 and a path of one line", found=f"{step} {text!r}")
    exits.append(COMMIT_FILE, f"{step} {text}\n")
    exits.committed(step)


def began(folder: Path) -> None:
    """Say which run folder this start works in: whoever started it can note there how it ended, or show it."""
    line = f"run {folder.absolute()}\n"
    if "\n" not in line[:-1]:
        exits.append(COMMIT_FILE, line)
        exits.append(exits.EXIT_FILE, line)


def folder_of(path: Path) -> Path | None:
    """The run folder that a file of commits, or an exit record, names; None where there is none."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    found = [line.partition(b" ")[2] for line in lines if line.startswith(b"run ")]
    return Path(os.fsdecode(found[-1])) if found else None


def newest_commit(path: Path) -> int | None:
    """The largest step in a file of commits; None where there is none."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    steps = [int(word) for line in lines if (word := line.partition(b" ")[0]).isdigit()]
    return max(steps, default=None)


def stop_requested() -> bool:
    """Whether SIGTERM, SIGUSR1 or SIGINT has come. Call it once before long work: signals are caught from then on.

    The answer is this process's own. Ranks that leave a loop by it must agree on the step, for example by an
    all-reduce of the answer; exit with code 75 when everything is saved.
    """
    signals.install()
    return signals.received() is not None
