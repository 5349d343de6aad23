"""Facts about what a training says of its own code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from worldsize.train import code

if TYPE_CHECKING:
    from pathlib import Path


def git(folder: Path, *words: str) -> str:
    """What git says, as somebody."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With one commit, and a folder inside."""
    folder = tmp_path / "code"
    (folder / "inside").mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def test_the_commit_is_git_s_own(repository: Path) -> None:
    """On a branch, when its references are packed, detached, and in a worktree."""
    expected = git(repository, "rev-parse", "HEAD")
    assert code.head(repository / "inside") == expected
    git(repository, "pack-refs", "--all")
    assert code.head(repository) == expected
    git(repository, "worktree", "add", "-q", "-b", "other", "../tree")
    assert code.head(repository.parent / "tree") == expected
    git(repository, "checkout", "-q", "--detach")
    assert code.head(repository) == expected


def test_outside_of_git_there_is_none(tmp_path: Path) -> None:
    """Nothing is guessed."""
    assert code.head(tmp_path) is None


def test_a_submitted_job_says_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit at submit, and a digest of the edits."""
    (tmp_path / "program.py").write_text("pass\n", encoding="utf-8")
    (tmp_path / "fingerprint.json").write_text(json.dumps({"commit": "abc", "changes": "def"}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py")])
    before = code.fingerprint()
    assert before["program"] == str(tmp_path / "program.py")
    monkeypatch.setenv(code.FINGERPRINT, str(tmp_path / "fingerprint.json"))
    assert code.fingerprint() == {**before, "commit": "abc", "changes": "def"}
    (tmp_path / "program.py").write_text("pass  # edited\n", encoding="utf-8")
    assert code.fingerprint()["digest"] != before["digest"]
