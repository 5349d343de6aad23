"""A run that was begun, and the ranks that a job asks for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from worldsize.errors import ConfigError
from worldsize.launch.preflight import fits

if TYPE_CHECKING:
    from pathlib import Path


def begun(folder: Path, **config: int) -> str:
    """A run folder."""
    (folder / "run.json").write_text(json.dumps({"config": config}))
    return str(folder)


def test_more_ranks_than_micro_batches_are_refused_with_the_numbers(tmp_path: Path) -> None:
    """Before it waits in a queue."""
    run = begun(tmp_path, global_batch=60, micro_batch=16)
    fits(run, 4)
    with pytest.raises(ConfigError, match=r"5 ranks, global_batch 60 = 4 micro-batches of 16.*at most 4 ranks"):
        fits(run, 5)


def test_ranks_that_share_a_micro_batch_are_not_counted(tmp_path: Path) -> None:
    """Under a strategy that splits the model."""
    fits(begun(tmp_path, global_batch=16, micro_batch=16), 8, "tensor")


def test_a_folder_without_a_run_fits(tmp_path: Path) -> None:
    """The job begins one."""
    fits(str(tmp_path / "new"), 64)


def test_a_damaged_run_is_told(tmp_path: Path) -> None:
    """Not thrown."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        fits(str(tmp_path), 1)
