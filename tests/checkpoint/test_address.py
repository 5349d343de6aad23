from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.checkpoint.states import odd, path_of, save_once
from worldsize.checkpoint.address import every, find
from worldsize.checkpoint.manifest import FOLDER
from worldsize.checkpoint.retain import Keep
from worldsize.errors import CheckpointError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose folder has an @ in its name, with checkpoints of steps 9 and 10."""
    for step in (9, 10):
        save_once(tmp_path / "a@b", Alone(), odd(step), step, keep=Keep(last=9))
    return tmp_path / "a@b"


def test_a_run_means_its_newest(run: Path) -> None:
    """By number, not by name; the folder of its checkpoints says the same."""
    assert find(run) == find(str(run)) == find(run / FOLDER) == path_of(run, 10)
    assert every(run) == [path_of(run, 9), path_of(run, 10)]


def test_a_checkpoint_means_itself(run: Path) -> None:
    """Wherever it lies and whatever it is called."""
    moved = path_of(run, 9).rename(run.parent / "kept")
    assert every(moved) == [moved]


def test_a_step_of_a_run(run: Path) -> None:
    """RUN@STEP, with or without leading zeros."""
    assert every(f"{run}@9") == every(f"{run}@0009") == [path_of(run, 9)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("{run}@11", "steps 9, 10"),
        ("{run}@x", "steps 9, 10"),
        ("{run}/nope", "no such folder"),
        ("{run}/nope@3", "no such folder"),
        ("{run}/checkpoints/step-00000009/train.json", "a file"),
        ("{run}/attempts", "0, 1"),
        ("{run}/attempts@3", "0, 1"),
    ],
)
def test_anything_else_says_what_is_there(run: Path, words: str, found: str) -> None:
    """One line, with what was found instead."""
    with pytest.raises(CheckpointError) as caught:
        find(words.format(run=run))
    assert f"Found: {found}." in str(caught.value)
