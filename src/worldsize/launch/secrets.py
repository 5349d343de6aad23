"""Room: values that reach the ranks and nothing else: kept in one file that only its owner can read."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FILE = "secrets.json"


def values(names: Sequence[str], environ: Mapping[str, str], *, setting: str = "secrets") -> dict[str, str]:
    """The variables of these names. Raises ConfigError for the ones that are not set; no value is ever shown."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise ConfigError(
            f"{setting} names what is not set here",
            found=", ".join(missing),
            do="export it in the shell that submits, or leave it out",
        )
    return {name: environ[name] for name in names}


def leave(path: Path, kept: Mapping[str, str]) -> None:
    """Write a new file for its owner alone. Raises OSError where there is one already, or no room."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dict(kept), file)
        file.flush()
        os.fsync(descriptor)


def read(path: Path) -> dict[str, str]:
    """The values by name.

    Raises:
        LaunchError: the file is not there, or others may read or may have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise LaunchError(
            "the job's secrets cannot be read", found=str(error), do="hand it over by `worldsize submit`"
        ) from error
    with os.fdopen(descriptor, encoding="utf-8") as file:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or not stat.S_ISREG(facts.st_mode):
            raise LaunchError(
                f"{path} is not its owner's alone",
                found=f"user {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):o}",
                do="replace what it holds, as others may have read it, and submit again",
            )
        found: dict[str, str] = json.load(file)
    return found
