"""`worldsize submit`: what its own options become."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from worldsize.cli.main import commands

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a program, and a shell with two variables."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOKEN", "hush")
    monkeypatch.setenv("MODE", "off line")


def preview(*options: str) -> list[str]:
    """The lines of the script."""
    done = CliRunner().invoke(commands, ["submit", "train.py", "--preview", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_variables_by_name() -> None:
    """One is shown, the other is a file's name."""
    lines = preview("--pass-env", "MODE", "--secret", "TOKEN")
    assert "export MODE='off line'" in lines
    assert any('--secrets="$folder/secrets.json"' in line for line in lines)
    assert "hush" not in "".join(lines)


def test_dependencies_in_sbatchs_words_or_one_each() -> None:
    """With commas, or the option again."""
    lines = preview("--dependency", "afterok:1:2,afterany:3", "--dependency", "singleton")
    assert "#SBATCH --dependency=afterok:1:2,afterany:3,singleton" in lines


def test_further_options() -> None:
    """As they are."""
    assert "#SBATCH --switches=1" in preview("--extra=--switches=1")


def test_binding_is_sruns() -> None:
    """And not the script's."""
    lines = preview("--cpu-bind", "none", "--gpu-bind", "single:1")
    assert [line.strip(" \\") for line in lines if "-bind" in line] == ["--cpu-bind=none", "--gpu-bind=single:1"]


def test_a_preview_is_quick() -> None:
    """Whatever it shows: nothing is copied, asked or compared. The best of several, on a machine that others use."""

    def took() -> float:
        began = time.process_time()
        preview("--snapshot", "--secret", "TOKEN", "--setup", "true")
        return time.process_time() - began

    assert min(took() for _ in range(3)) < 0.3
