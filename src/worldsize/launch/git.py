"""Room: what git says of a folder, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import WorldsizeError
from worldsize.launch import env, shell

if TYPE_CHECKING:
    from pathlib import Path


def say(folder: Path, *words: str, timeout: float = 60.0) -> str | None:
    """What it prints; None where it is not here, the folder is no repository, or it takes too long."""
    try:
        done = shell.call(["git", "-C", str(folder), *words], env.read(), timeout=timeout)
    except WorldsizeError:
        return None
    return done.out if done.code == 0 else None
