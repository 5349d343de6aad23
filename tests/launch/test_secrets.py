"""The file of a job's secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from worldsize.errors import ConfigError, LaunchError
from worldsize.launch import secrets

if TYPE_CHECKING:
    from pathlib import Path

KEPT = {"TOKEN": "hush", "ODD": "a\n'\"$é"}


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A file with two secrets."""
    secrets.leave(tmp_path / "s.json", KEPT)
    return tmp_path / "s.json"


def test_it_is_its_owners_alone_and_gives_the_values_back(left: Path) -> None:
    """Whatever they hold."""
    assert left.stat().st_mode & 0o777 == 0o600
    assert secrets.read(left) == KEPT


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_may_read_or_write_is_refused(left: Path, mode: int) -> None:
    """And its values are not said."""
    left.chmod(mode)
    with pytest.raises(LaunchError, match="not its owner's alone") as caught:
        secrets.read(left)
    assert "hush" not in str(caught.value)


def test_no_link_is_followed_and_nothing_is_written_over(left: Path, tmp_path: Path) -> None:
    """Somebody else may have laid it there."""
    (tmp_path / "link").symlink_to(left)
    with pytest.raises(LaunchError):
        secrets.read(tmp_path / "link")
    with pytest.raises(FileExistsError):
        secrets.leave(left, {})


def test_one_that_is_not_there_says_how_it_comes_there(tmp_path: Path) -> None:
    """A script that was saved and given to sbatch by hand has none."""
    with pytest.raises(LaunchError, match="worldsize submit"):
        secrets.read(tmp_path / "none")


def test_what_is_not_set_is_named_and_what_is_set_is_not_shown() -> None:
    """Names only."""
    with pytest.raises(ConfigError, match="A, B") as caught:
        secrets.values(("A", "TOKEN", "B"), KEPT)
    assert "hush" not in str(caught.value)
