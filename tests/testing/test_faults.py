"""Faults on purpose."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.train import small
from worldsize.checkpoint import manifest
from worldsize.testing.faults import kill_after, kill_in_save, tmpfs
from worldsize.testing.nursery import Crew

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_system_has_its_size(tmp_path: Path) -> None:
    """And is gone afterwards."""
    with tmpfs(tmp_path / "small", 1 << 20) as folder:
        (folder / "a").write_bytes(bytes(1 << 19))
        with pytest.raises(OSError, match="No space") as caught:
            (folder / "b").write_bytes(bytes(1 << 20))
        assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "small").iterdir()) == []


def test_a_kill_comes_in_the_save_that_it_is_aimed_at(tmp_path: Path) -> None:
    """Something half written is left, or the commit was faster."""
    crew = Crew(2, tmp_path / "logs")
    crew.start(small.train, tmp_path / "run", duration="100000st", saving=small.OFTEN)
    assert kill_in_save(crew, tmp_path / "run", 0.0)
    assert crew.codes() == [-9, -9]
    crew.close()
    assert (tmp_path / "run" / manifest.FOLDER).is_dir()


def test_a_run_that_ended_was_not_killed(tmp_path: Path) -> None:
    """Nobody counts a kill that hit nobody."""
    crew = Crew(1, tmp_path / "logs")
    crew.start(small.train, tmp_path / "run")
    assert not kill_after(crew, 60)
    crew.close()
