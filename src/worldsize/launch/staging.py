"""Room: copies on a node's own disk, made once a node, held while they are used, gone when the last user has ended.

The folder is locked by those who use it, as every temporary folder of ours: one that was left by processes that were killed
is swept by the next that make one here (`scratch`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, LaunchError
from worldsize.launch import scratch, shell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = "WORLDSIZE_STAGE"
"""The variable that names the copies' folder."""
PLACE = "{stage}"
"""The same, in the words of a program."""

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
_READY, _HERE, _ENVIRONMENT = ".ready", ".here-", ".env"
_POLL_S = 0.2


def is_archive(path: str) -> bool:
    """Whether an environment is given packed, by its name."""
    return path.endswith(_ARCHIVES)


def check(paths: Sequence[str], venv: str | None) -> None:
    """Raises ConfigError for what is not there, or would lie at one place twice."""
    missing = [path for path in (*paths, *([venv] if venv and is_archive(venv) else [])) if not Path(path).exists()]
    if missing:
        raise ConfigError("what is to be staged is not there", found=", ".join(missing), do="mend stage or venv")
    names = [Path(path).name for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("two staged paths have one name", found=", ".join(twice), do="stage the folder around them")


class Stage:
    """The folder of copies on this node.

    Args:
        name: of the attempt, equal for all its tasks on this node.
        paths: what is copied: absolute.
        venv: an archive of a virtual environment, or None.
    """

    def __init__(self, name: str, paths: Sequence[str], venv: str | None = None) -> None:
        self.path = Path(tempfile.gettempdir()) / f"{scratch.PREFIX}stage-{name}"
        self._paths, self._venv = paths, venv
        self._lock: int | None = None

    def fill(self, environ: Mapping[str, str]) -> None:
        """Copy everything; by one task of a node.

        Raises:
            LaunchError: there is no room, or something cannot be read. Nothing is left.
        """
        scratch.sweep()
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise LaunchError("the folder for staged copies cannot be made", found=str(error), do=_ROOM) from error
        self._hold()
        try:
            for path in map(Path, self._paths):
                _copy(path, self.path / path.name)
            if self._venv:
                _unpack(Path(self._venv), self.path / _ENVIRONMENT, environ)
            (self.path / _READY).touch()
        except (OSError, shutil.Error) as error:
            self.leave()
            raise LaunchError("staging failed", found=_short(error), do=_ROOM) from error
        except BaseException:
            self.leave()
            raise

    def gather(self, tasks: int) -> None:
        """Wait for the other tasks of this node: who goes before they came would take the copies from them."""
        while len(list(self.path.glob(f"{_HERE}*"))) < tasks - 1:
            time.sleep(_POLL_S)

    def wait(self, task: int) -> None:
        """Until another task of this node has copied everything: should it fail, Slurm ends this one too.

        Args:
            task: the number of this one.

        Raises:
            LaunchError: the folder is another user's.
        """
        while not (self.path / _READY).exists():
            time.sleep(_POLL_S)
        if self.path.lstat().st_uid != os.geteuid():
            raise LaunchError("the staged copies are another user's", found=str(self.path), do="set TMPDIR")
        self._hold()
        (self.path / f"{_HERE}{task}").touch()

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the ranks are told."""
        told = {FOLDER: str(self.path)}
        if self._venv:
            home = self.python.parent.parent
            told |= {"VIRTUAL_ENV": str(home), "PATH": f"{home}/bin:{environ.get('PATH', os.defpath)}"}
        return told

    @property
    def python(self) -> Path:
        """The interpreter of the unpacked environment.

        Raises:
            LaunchError: there is none in it.
        """
        inside = self.path / _ENVIRONMENT
        found = [*inside.glob("bin/python"), *inside.glob("*/bin/python")]
        if not found:
            raise LaunchError("the archive holds no environment", found=f"no bin/python in {self._venv}", do=_PACK)
        return found[0]

    def leave(self) -> None:
        """Go; whoever goes last removes it. Safe to call twice."""
        if self._lock is None:
            return
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _hold(self) -> None:
        self._lock = os.open(self.path / scratch.HELD, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        os.pwrite(self._lock, scratch.host(), 0)


_ROOM = "see the space in TMPDIR of the nodes, or stage less"
_PACK = "make it with `tar -czf env.tar.gz -C VENV .`, or conda-pack"


def _copy(path: Path, to: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, to, symlinks=True)
    else:
        shutil.copy2(path, to)


def _unpack(archive: Path, to: Path, environ: Mapping[str, str]) -> None:
    to.mkdir()
    done = shell.call(["tar", "-xf", str(archive), "-C", str(to)], environ)
    if done.code:
        raise LaunchError(f"{archive} cannot be unpacked", found=done.err.strip()[-300:], do=_ROOM)
    # What conda-pack leaves to be done where it is unpacked: prefixes in scripts.
    for mend in (*to.glob("bin/conda-unpack"), *to.glob("*/bin/conda-unpack")):
        shell.call([str(mend.parent / "python"), str(mend)], environ)


def _short(error: Exception) -> str:
    """A copy of many files fails with a list of all that did."""
    inner = error.args[0] if isinstance(error, shutil.Error) and error.args else None
    return str(inner[0][2]) if isinstance(inner, list) and inner else str(error)
