"""Room: who may write a run folder. One live writer; a successor shuts the door behind the one before. No torch.

Every attempt claims by linking `attempts/<n>/owner.json`, which only one process can; the owner is the one with the
highest number. Nobody ever writes another's file, so a writer that was cut off cannot take the folder back.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from worldsize.checkpoint import disk, retain
from worldsize.errors import OwnershipError

ATTEMPTS = "attempts"
OWNER = "owner.json"
_CLOCK = 3.0
"""Seconds by which two readings of a process's start may differ."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The writer of a run folder in one attempt."""

    run_dir: Path
    run_id: str
    attempt: int
    """0 for the first start of a run, one more for each further one."""
    token: str
    """Tells this claim from every other one."""
    host: str
    pid: int
    started: float
    """When the process began (seconds since 1970), to know it from a later one with the same pid."""
    job: str | None = None
    """What the scheduler calls it, where there is one."""
    released: bool = False

    @property
    def folder(self) -> Path:
        """`attempts/<n>`: what belongs to this attempt alone."""
        return self.run_dir / ATTEMPTS / str(self.attempt)

    def check(self) -> None:
        """Raise OwnershipError if another attempt has taken the run folder over, or it is gone."""
        with suppress(OSError):
            # A changed folder makes the client of a shared file system look again instead of trusting its cache.
            os.utime(self.run_dir / ATTEMPTS)
        now = current(self.run_dir)
        if now is None or now.token != self.token:
            raise OwnershipError(
                f"attempt {self.attempt} (pid {self.pid} on {self.host}) no longer owns {self.run_dir}",
                found="the claim is gone" if now is None else f"attempt {now.attempt}, pid {now.pid} on {now.host}",
                do="stop this process: its successor has taken over",
            )

    def release(self) -> None:
        """Say that this attempt is over, so that a process on any host may follow at once."""
        with suppress(OSError):
            disk.replace(self.folder / OWNER, replace(self, released=True).text())

    def text(self) -> str:
        """What the owner file says."""
        body = asdict(self)
        del body["run_dir"]
        return json.dumps(body, indent=1) + "\n"


def current(run_dir: Path | str) -> Owner | None:
    """The last claim on a run folder, dead or alive; None where nobody ever claimed it or its file is damaged."""
    number = _last(Path(run_dir))
    return None if number is None else _read(Path(run_dir), number)


def seen(owner: Owner, patience: float = 30.0) -> bool:
    """Whether this process sees the same run folder, within `patience` seconds (shared file systems lag)."""
    end = time.monotonic() + patience
    while True:
        now = current(owner.run_dir)
        if now is not None and now.token == owner.token:
            return True
        if time.monotonic() > end:
            return False
        with suppress(OSError):
            os.utime(owner.run_dir / ATTEMPTS)
        time.sleep(0.2)


def alive(owner: Owner) -> bool:
    """Whether the owner is a living process of this host. Of other hosts nothing is known: False."""
    if owner.released or owner.host != socket.gethostname():
        return False
    started = _started(owner.pid)
    return started is not None and abs(started - owner.started) < _CLOCK


def claim(run_dir: Path | str, *, run_id: str, job: str | None = None, force: bool = False) -> Owner:
    """Become the one writer of a run folder, and clear what dead writers left half done.

    A dead owner, and one on another host, is followed; two that claim at once: one wins.

    Args:
        run_dir: made with mode 0700 where it does not exist.
        run_id: the name of the run.
        job: what the scheduler calls this start.
        force: take over from a living process of this host too.

    Raises:
        OwnershipError: a living process of this host owns it, or another one was faster.
        CheckpointError: the folder cannot be written.
    """
    run_dir = Path(run_dir).absolute()
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = _next(run_dir, run_id, job, force=force)
        _link(owner)
        retain.sweep(run_dir)
    except OSError as error:
        raise disk.explain(error, "claiming", run_dir) from error
    return owner


def _next(run_dir: Path, run_id: str, job: str | None, *, force: bool) -> Owner:
    last, before = _last(run_dir), current(run_dir)
    if before is not None and alive(before) and before.pid != os.getpid() and not force:
        raise OwnershipError(
            f"{run_dir} is owned by a living process",
            found=f"pid {before.pid} on {before.host}, attempt {before.attempt}",
            do="wait for it, end it, or use another run folder",
        )
    started = _started(os.getpid())
    assert started is not None
    number = 0 if last is None else last + 1
    return Owner(run_dir, run_id, number, uuid4().hex[:12], socket.gethostname(), os.getpid(), started, job)


def _link(owner: Owner) -> None:
    owner.folder.mkdir(parents=True, exist_ok=True)
    beside = owner.folder / f".{OWNER}.{owner.token}"
    try:
        disk.write(beside, owner.text())
        try:
            os.link(beside, owner.folder / OWNER)
        except FileExistsError:
            raise _raced(owner) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            _create(owner)
    finally:
        beside.unlink(missing_ok=True)
    disk.sync(owner.folder)
    disk.sync(owner.folder.parent)


def _create(owner: Owner) -> None:
    """Where the file system has no links: exclusive creation, whose content comes a moment later."""
    try:
        with (owner.folder / OWNER).open("x") as file:
            file.write(owner.text())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise _raced(owner) from None


def _raced(owner: Owner) -> OwnershipError:
    return OwnershipError(
        f"another process claimed {owner.run_dir} at the same moment",
        found=f"attempt {owner.attempt} is taken",
        do="start a run once, or give each its own folder",
    )


def _last(run_dir: Path) -> int | None:
    folder = run_dir / ATTEMPTS
    if not folder.is_dir():
        return None
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal() and (path / OWNER).exists()]
    return max(numbers, default=None)


def _read(run_dir: Path, number: int) -> Owner | None:
    try:
        body = json.loads((run_dir / ATTEMPTS / str(number) / OWNER).read_text())
        return Owner(run_dir=run_dir, **body)
    except (OSError, ValueError, TypeError):
        return None


def _started(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None
