"""Room: bytes that must survive. Synced files and folders, their digests, and what to say when the disk says no."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from uuid import uuid4

from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

T = TypeVar("T")
PIECE = 16 << 20
"""Bytes of one piece of a digest: pieces are digested beside each other."""

_THREADS = 4
_SCHEME = "sha256/16M:"
_HELP = {
    errno.ENOSPC: "free some space there, or keep fewer checkpoints",
    errno.EDQUOT: "free some of your quota there, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "choose a run folder that can be written",
    errno.EACCES: "choose a run folder that you may write",
    errno.EPERM: "choose a run folder that you may write",
}


@dataclass(frozen=True, slots=True)
class FileFact:
    """What a file must be: its size in bytes, and the digest of its content."""

    size: int
    digest: str


class Digest:
    """SHA-256 over the SHA-256 of every 16 MiB piece, fed in any portions."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._piece, self._room = hashlib.sha256(), PIECE

    def update(self, data: memoryview) -> None:
        """Take more bytes."""
        while data:
            part = data[: self._room]
            self._piece.update(part)
            self._room -= len(part)
            data = data[len(part) :]
            if not self._room:
                self._close()

    def text(self) -> str:
        """The digest with the name of its scheme. Nothing can be added afterwards."""
        if self._room < PIECE:
            self._close()
        return joined(self._pieces)

    def _close(self) -> None:
        self._pieces.append(self._piece.digest())
        self._piece, self._room = hashlib.sha256(), PIECE


def joined(pieces: list[bytes]) -> str:
    """The digest of a file whose pieces have these digests."""
    return _SCHEME + hashlib.sha256(b"".join(pieces)).hexdigest()


def fact(path: Path) -> FileFact:
    """Size and digest of a file as it is read back. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def piece(start: int) -> bytes:
            return _piece(file.fileno(), start, min(PIECE, size - start))

        return FileFact(size, joined(spread(piece, range(0, size, PIECE))))


def spread(work: Callable[[int], T], items: Sequence[int]) -> list[T]:
    """What `work` gives for each of the items, by some threads. Raises the first exception of one.

    By plain ones: a pool takes no more work once the interpreter has begun to end, and a save under way must not fail of that.
    """
    found: dict[int, T] = {}
    failures: list[BaseException] = []

    def part(start: int) -> None:
        try:
            for index in range(start, len(items), _THREADS):
                found[index] = work(items[index])
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    threads = [Thread(target=part, args=(start,), daemon=True) for start in range(1, min(_THREADS, len(items)))]
    for thread in threads:
        thread.start()
    part(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [found[index] for index in range(len(items))]


def _piece(descriptor: int, start: int, length: int) -> bytes:
    found = hashlib.sha256()
    while length:
        part = os.pread(descriptor, length, start)
        if not part:
            break
        found.update(part)
        start, length = start + len(part), length - len(part)
    return found.digest()


class Recorder:
    """A binary file being written that knows the digest of what it was given, and syncs before it closes."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._digest, self._size = Digest(), 0
        self._closed = False
        self.failure: OSError | None = None
        """What the disk said, for callers whose own layers turn it into something else."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = error
            raise
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def fileno(self) -> int:
        """The descriptor, for syncing."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Sync and close; a second time does nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                with suppress(OSError):
                    self._file.close()

    def fact(self) -> FileFact:
        """Size and digest of all that was written."""
        return FileFact(self._size, self._digest.text())


def write(path: Path, text: str) -> FileFact:
    """Write a text file and sync it. Returns what it must be when read back."""
    file = Recorder(path)
    try:
        file.write(text.encode())
    finally:
        file.close()
    return file.fact()


def replace(path: Path, text: str) -> None:
    """Put a text file in place of another, whole or not at all."""
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        write(beside, text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; there its entries are written through anyway.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def free(path: Path) -> int | None:
    """Free bytes where `path` is (or would be), or None where that cannot be told."""
    for place in (path, *path.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def explain(error: OSError, doing: str, path: Path) -> CheckpointError:
    """One line for people: what failed where, on which host, and how much space is left there."""
    left = free(path)
    space = "" if left is None else f"; {left:,} bytes free there"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CheckpointError(
        f"{doing} {path} failed on {socket.gethostname()}: {reason}",
        found=f"errno {errno.errorcode.get(error.errno or 0, '?')}{space}",
        do=_HELP.get(error.errno or 0, "look at the file system under that path"),
    )


def check_writable(run_dir: Path) -> int | None:
    """Refuse a run folder in which no checkpoint could be made, before any training.

    Writes, renames and removes a small file there. Returns the free bytes (None where they cannot be told).
    Raises CheckpointError.
    """
    probe = run_dir / f".probe-{uuid4().hex[:8]}"
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write(probe, "can this folder be written?\n")
            probe.rename(renamed := probe.with_suffix(".renamed"))
            renamed.unlink()
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, "writing to", run_dir) from error
    return free(run_dir)
