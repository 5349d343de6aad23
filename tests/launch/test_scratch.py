"""Temporary folders go with their process."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import finish, run, script, start, until
from worldsize.launch import scratch
from worldsize.launch.scratch import Scratch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for temporary files that is empty, here and in what is started."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place


def left(place: Path) -> list[Path]:
    """The folders there, made old enough to be swept."""
    for folder in place.iterdir():
        os.utime(folder, (time.time() - 3600,) * 2)
    return sorted(place.iterdir())


def killed_launcher(folder: Path) -> None:
    """SIGKILL for a launcher whose rank is at work."""
    process = start(script(folder, f"open({str(folder / 'up')!r}, 'w').close()\ntime.sleep(600)"))
    until((folder / "up").exists)
    process.send_signal(signal.SIGKILL)
    finish(process)


def test_a_killed_launcher_is_swept_up_after(tmp_path: Path, tmp: Path) -> None:
    """By the next one that starts."""
    killed_launcher(tmp_path)
    assert len(left(tmp)) == 1
    assert run(script(tmp_path, "pass")).code == 0
    assert left(tmp) == []


def test_what_a_living_process_has_is_not_swept(tmp: Path) -> None:
    """However old it is."""
    with Scratch("a") as one:
        assert left(tmp) == [one.path]
        with Scratch("b"):
            assert one.path.is_dir()


def test_what_is_kept_for_a_person_stays(tmp_path: Path, tmp: Path) -> None:
    """The logs that a failure's line names outlive their launcher and all that follow."""
    ended = run(script(tmp_path, "sys.exit(3)"))
    (folder,) = left(tmp)
    assert str(folder) in ended.err
    scratch.sweep()
    assert len(list(folder.rglob("rank-0000.log"))) == 1


@pytest.mark.parametrize("text", ["pass", "sys.exit(75)"])
def test_what_nobody_was_told_of_is_removed(tmp_path: Path, tmp: Path, text: str) -> None:
    """After a success, and after a stop on request."""
    run(script(tmp_path, text))
    assert left(tmp) == []


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, tmp: Path) -> None:
    """An interpreter that is not there: nothing was started, so there is nothing to look at."""
    path = script(tmp_path, "", "program")
    path.write_text("#!/no/such/interpreter\n", encoding="utf-8")
    path.chmod(0o700)
    assert run("--no-python", path).code == 2
    assert left(tmp) == []


def test_a_young_folder_is_left_alone(tmp_path: Path, tmp: Path) -> None:
    """Its process may be about to take the lock."""
    killed_launcher(tmp_path)
    scratch.sweep()
    assert len(left(tmp)) == 1


def test_another_host_s_folder_is_left_alone(tmp_path: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared file system its lock may not be seen from here."""
    killed_launcher(tmp_path)
    (folder,) = left(tmp)
    monkeypatch.setattr(scratch, "host", lambda: b"elsewhere")
    scratch.sweep()
    assert left(tmp) == [folder]


def test_links_and_foreign_names_are_left_alone(tmp_path: Path, tmp: Path) -> None:
    """Only folders with our prefix that hold a lock file."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".held").touch()
    (tmp / "worldsize-link").symlink_to(tmp_path / "elsewhere")
    for name in ("other-tool", "worldsize-without"):
        (tmp / name).mkdir()
    left(tmp)
    scratch.sweep()
    assert len(left(tmp)) == 3
    assert (tmp_path / "elsewhere" / ".held").exists()
