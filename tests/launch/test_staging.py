"""Copies on a node's own disk: held while they are used, gone when the last has left."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from worldsize.errors import ConfigError, LaunchError
from worldsize.launch import scratch, staging
from worldsize.launch.staging import Stage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of data."""
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "a").write_text("a")
    return tmp_path / "data"


def name() -> str:
    """One that nobody else has."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


def test_whoever_leaves_last_removes_it(source: Path) -> None:
    """A task that ends early takes nothing from the others."""
    same = name()
    first, second = Stage(same, [str(source)]), Stage(same, [str(source)])
    first.fill({})
    second.wait(1)
    first.gather(2)
    first.leave()
    assert (second.path / "data" / "deep" / "a").read_text() == "a"
    assert second.path.stat().st_mode & 0o777 == 0o700
    second.leave()
    second.leave()
    assert not second.path.exists()


def test_what_killed_processes_left_is_swept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next that makes such a folder here; one in use stays."""
    monkeypatch.setattr(tempfile, "tempdir", os.environ["TMPDIR"])
    code = (
        f"import os\nfrom worldsize.launch.staging import Stage\nstage = Stage({name()!r}, [{str(source)!r}])\n"
        "stage.fill({})\nprint(stage.path, flush=True)\nos.kill(os.getpid(), 9)"
    )
    left = Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    )
    used = Stage(name(), [str(source)])
    used.fill(dict(os.environ))
    for folder in (left, used.path):
        os.utime(folder, (0, 0))
    scratch.sweep()
    assert (left.exists(), used.path.exists()) == (False, True)
    used.leave()


def test_a_copy_that_fails_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    """One line."""
    stage = Stage(name(), [str(tmp_path / "none")])
    with pytest.raises(LaunchError, match=r"staging failed.*none.*TMPDIR"):
        stage.fill({})
    assert not stage.path.exists()


def test_a_folder_that_somebody_else_made_is_not_used(source: Path) -> None:
    """Its name can be guessed."""
    stage = Stage(name(), [str(source)])
    stage.path.mkdir()
    with pytest.raises(LaunchError, match="cannot be made"):
        stage.fill({})
    stage.path.rmdir()


@pytest.mark.parametrize("inside", [".", "env"])
def test_an_archive_is_unpacked_and_mended(tmp_path: Path, inside: str) -> None:
    """Also with a folder around it; what conda-pack leaves to be done is done."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    (tools / "conda-unpack").write_text("import pathlib; pathlib.Path(__file__).with_name('mended').touch()")
    with tarfile.open(tmp_path / "e.tgz", "w:gz") as packed:
        packed.add(tools, f"{inside}/bin")
    stage = Stage(name(), [], str(tmp_path / "e.tgz"))
    stage.fill({"PATH": os.defpath})
    assert (stage.python.parent / "mended").exists()
    assert stage.variables({"PATH": "/x"})["PATH"] == f"{stage.python.parent}:/x"
    stage.leave()


def test_an_archive_that_holds_no_environment_is_told(tmp_path: Path) -> None:
    """With how to make one."""
    with tarfile.open(tmp_path / "e.tar", "w"):
        pass
    stage = Stage(name(), [], str(tmp_path / "e.tar"))
    stage.fill({"PATH": os.defpath})
    with pytest.raises(LaunchError, match="conda-pack"):
        _ = stage.python
    stage.leave()


def test_before_anything_is_queued_paths_are_looked_at(source: Path) -> None:
    """What is not there, and two that would lie at one place."""
    with pytest.raises(ConfigError, match="not there"):
        staging.check([str(source / "none")], None)
    with pytest.raises(ConfigError, match=r"one name.*data"):
        staging.check([str(source), str(source / ".." / "data")], None)
