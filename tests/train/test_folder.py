"""run.json says what the training is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from worldsize.config import Duration
from worldsize.errors import CheckpointError, LayoutError
from worldsize.runtime.comm import Alone
from worldsize.train.folder import RunFolder
from worldsize.train.settings import Settings

SETTINGS = Settings(Path("run"), 48, 4, Duration(2, "ep"))
ORDER = {"shuffle": True}


def test_the_first_attempt_describes_the_run(tmp_path: Path) -> None:
    """Settings, command, environment, an id."""
    assert RunFolder(tmp_path).begin(SETTINGS, ORDER) == []
    body = json.loads((tmp_path / "run.json").read_text())
    assert body["config"] == SETTINGS.frozen()
    assert body["order"] == ORDER
    assert body["environment"].keys() >= {"python", "torch"}


def test_later_attempts_compare(tmp_path: Path) -> None:
    """A refused change leaves the file as it is, an accepted one is written down."""
    folder = RunFolder(tmp_path)
    folder.begin(SETTINGS, ORDER)
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(LayoutError, match="seed: began with 0, now 1"):
        folder.begin(replace(SETTINGS, seed=1), ORDER)
    assert (tmp_path / "run.json").read_text() == before
    (note,) = folder.begin(replace(SETTINGS, seed=1, accept=("seed",)), ORDER)
    assert note == "seed changed from 0 to 1, accepted; run.json says so from now on"
    assert folder.begin(replace(SETTINGS, seed=1), ORDER) == []


def test_another_duration_is_told(tmp_path: Path) -> None:
    """It needs no permission, but the file is written anew."""
    folder = RunFolder(tmp_path)
    folder.begin(SETTINGS, ORDER)
    (note,) = folder.begin(replace(SETTINGS, duration=Duration(3, "ep")), ORDER)
    assert note.startswith("duration changed from 2ep to 3ep; ")
    assert folder.read()["config"]["duration"] == "3ep"


def test_other_data_is_refused_until_it_is_accepted(tmp_path: Path) -> None:
    """And the first data stays written down."""
    folder, comm = RunFolder(tmp_path), Alone()
    folder.begin(SETTINGS, ORDER)
    assert folder.same_data(comm, SETTINGS, {"length": 9}) == []
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"began with {'length': 9}, now {'length': 8}"):
            folder.same_data(comm, SETTINGS, {"length": 8})
    (note,) = folder.same_data(comm, replace(SETTINGS, accept=("data",)), {"length": 8})
    assert note.endswith("accepted")
    assert folder.same_data(comm, SETTINGS, {"length": 8}) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Not taken for a new run."""
    (tmp_path / "run.json").write_text('{"id"')
    with pytest.raises(CheckpointError, match=r"run.json is damaged"):
        RunFolder(tmp_path).begin(SETTINGS, ORDER)
