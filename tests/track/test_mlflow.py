"""Facts about an MLflow store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.train import small
from worldsize.testing.nursery import Crew
from worldsize.track.base import Row, Training
from worldsize.track.mlflow import MLflow
from worldsize.track.spec import Track

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one store, whose making takes seconds."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the person has who runs this."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def opened(runs: Path, name: str, attempt: int = 0, **more: Any) -> MLflow:
    """An attempt of a run of this name."""
    (runs / name).mkdir(exist_ok=True)
    return MLflow(Training(runs / name, f"id of {name}", attempt, 0, **more))


def told(book: MLflow) -> Any:
    """What the store says about the run."""
    return book._client.get_run(book.ids["run_id"])


def test_runs_share_a_store_beside_them(runs: Path) -> None:
    """Each is a run of one experiment, which has the folder's name. What is left of a making that was killed is no matter."""
    (runs / "a").mkdir()
    (runs / "a" / "mlflow.db.new").write_bytes(b"half a store")
    first, second = opened(runs, "a"), opened(runs, "b")
    assert told(first).info.run_name == "a"
    assert told(first).info.experiment_id == told(second).info.experiment_id
    assert first._client.get_experiment(told(first).info.experiment_id).name == runs.name
    assert {path.name for path in runs.rglob("*") if path.is_file()} == {"mlflow.db"}


def test_a_run_that_was_not_written_down_is_found(runs: Path) -> None:
    """A kill between its making and run.json: there is no second one."""
    assert opened(runs, "lost").ids == opened(runs, "lost", 1).ids


def test_numbers_that_came_twice_are_there_once(runs: Path) -> None:
    """A kill between numbers and what says how far they go."""
    book = opened(runs, "twice")
    rows = [Row(step, 1000.0 + step, {"loss": step / 3}) for step in range(5)]
    book.log(rows[:4])
    book._client.set_tag(book.ids["run_id"], "worldsize.through", "2")
    again = opened(runs, "twice", 1, ids=book.ids)
    assert again.through == 2
    again.log(rows[2:])
    history = again._client.get_metric_history(book.ids["run_id"], "loss")
    assert [(metric.step, metric.value, metric.timestamp) for metric in history] == [
        (row.step, row.values["loss"], row.time * 1000) for row in rows
    ]
    assert opened(runs, "twice", 2, ids=book.ids).through == 5


def test_settings_are_parameters_and_a_change_is_a_tag(runs: Path) -> None:
    """A store never changes a parameter; code and environment are tags."""
    code = {"commit": "abc", "program": "/train.py"}
    first = opened(runs, "set", config={"seed": 1, "strategy": "ddp"}, environment={"torch": "2", "code": code})
    second = opened(
        runs, "set", 1, config={"seed": 1, "strategy": "fsdp", "new": 3}, ended=["0: killed"], ids=first.ids
    )
    data = told(second).data
    assert data.params == {"seed": "1", "strategy": "ddp", "new": "3"}
    assert data.tags["config.strategy"] == "fsdp"
    assert data.tags["mlflow.source.git.commit"] == "abc"
    assert data.tags["environment.torch"] == "2"
    assert data.tags["worldsize.attempts"] == "0: killed\n1: from step 0"


@pytest.mark.parametrize(
    ("status", "word"), [("finished", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED"), (None, "RUNNING")]
)
def test_it_says_how_it_ended(runs: Path, status: Any, word: str) -> None:
    """Until the next attempt, which runs again."""
    book = opened(runs, f"ended {status}")
    if status is not None:
        book.close(status, "in words")
        assert told(book).data.tags["worldsize.status"] == "in words"
    assert told(book).info.status == word
    assert told(opened(runs, f"ended {status}", 1)).info.status == "RUNNING"


def unreachable(folder: Path) -> None:
    """A training whose server is not there."""
    small.train(folder, track=Track("mlflow", uri="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("retries", "limit"), [("0", 120.0), pytest.param("7", 120.0, marks=pytest.mark.matrix)]
)  # fmt: skip
def test_a_server_that_is_not_there_is_a_warning(tmp_path: Path, retries: str, limit: float) -> None:
    """B091: the training ends as usual, in bounded time; said once, and at the end what was not taken."""
    began = time.monotonic()
    crew = Crew(1, tmp_path / "logs", {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": retries})
    crew.start(unreachable, tmp_path / "run")
    assert crew.wait(limit) == [0], crew.said()
    crew.close()
    said = [line for line in crew.said().splitlines() if "tracker mlflow" in line]
    assert len(said) == 2, crew.said()
    assert "training goes on" in said[0]
    assert "did not take steps 0 to 5" in said[1]
    assert time.monotonic() - began < limit
