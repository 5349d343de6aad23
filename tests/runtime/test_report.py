"""What a program tells its launcher."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from worldsize.errors import ConfigError
from worldsize.runtime.report import COMMIT_FILE, committed, newest_commit

if TYPE_CHECKING:
    from pathlib import Path


def test_commits_are_lines_and_the_largest_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step and path, appended; odd names of folders stay what they are."""
    monkeypatch.setenv(COMMIT_FILE, str(tmp_path / "commits"))
    committed("runs/a 0/10", 10)
    committed(tmp_path / "b", 7)
    assert (tmp_path / "commits").read_text(encoding="utf-8") == f"10 runs/a 0/10\n7 {tmp_path / 'b'}\n"
    assert newest_commit(tmp_path / "commits") == 10


def test_without_a_launcher_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain python run of the same program."""
    monkeypatch.delenv(COMMIT_FILE, raising=False)
    committed("here", 1)


def test_no_file_is_no_commit(tmp_path: Path) -> None:
    """A program that reports nothing."""
    assert newest_commit(tmp_path / "commits") is None
    (tmp_path / "commits").write_bytes(b"\xff garbage\n\n")
    assert newest_commit(tmp_path / "commits") is None


@pytest.mark.parametrize(("path", "step"), [("a\nb", 1), ("a", -1)])
def test_what_is_no_commit_is_refused(path: str, step: int) -> None:
    """A line break would be a second line."""
    with pytest.raises(ConfigError, match="a commit is"):
        committed(path, step)


STOPS = """
import os, signal, sys, worldsize as ws
assert not ws.stop_requested()
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
assert ws.stop_requested()
assert "torch" not in sys.modules
sys.exit(75)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_stop_is_seen_after_the_first_question(name: str) -> None:
    """B041: the signal does not end the program, the answer changes; no torch is loaded."""
    assert subprocess.run([sys.executable, "-c", STOPS, name], check=False).returncode == 75
