"""Room: pickles on disk: written for their owner alone, loaded only from where nobody else can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from worldsize.errors import LaunchError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def put(path: Path, data: bytes) -> None:
    """Write it for its owner alone, there whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def get(folder: Path, name: str) -> bytes:
    """The bytes of the file `name` (a path below `folder`), opened step by step: nothing can be put in its place.

    Raises:
        FileNotFoundError: there is none.
        LaunchError: a folder on the way, or the file, is another user's or can be written by others.
    """
    *folders, last = Path(name).parts
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _ours(at, folder)
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at, folder = inner, folder / part
            _ours(at, folder)
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)
    with open(file, "rb") as opened:  # noqa: PTH123 - a descriptor
        _ours(file, folder / last)
        return opened.read()


def _ours(descriptor: int, path: Path) -> None:
    facts = os.fstat(descriptor)
    if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS:
        raise LaunchError(
            f"{path} is not loaded: others can write it, and a pickle runs what is in it",
            found=f"owner {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):o}; this is user {os.geteuid()}",
            do=f"put jobs into a folder of your own; chmod go-w {path}, if nobody else did",
        )
