"""A run that is killed and resumed on other world sizes is one run in each library, with growing steps."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

import worldsize as ws
from tests.track import libraries
from tests.train import small
from worldsize.testing.nursery import Crew
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
STEPS = 48
ALL = ("tensorboard", "mlflow", "wandb")
ALONE = {
    "WANDB_API_KEY": "",
    "MLFLOW_TRACKING_URI": "",
    "NETRC": "/nowhere",
    "WANDB_DISABLE_CODE": "true",
}
"""No key, no server."""


def train(folder: Path, rest: float) -> None:
    """Rests in each step; each fifth is committed. Each rank says which libraries it has loaded."""
    run = small.make(folder, track=ALL, duration=f"{STEPS}st", saving=ws.Saving(every="5st"))
    model, _ = small.parts(run)
    for step in small.steps(run, model):
        run.log({"double": 2.0 * step.index})
        if step.index % 3 == 0:
            run.log({"third": torch.rand(()).item()})
        time.sleep(rest)
        if step.index == STEPS // 2:
            loaded = sorted(set(ALL) & set(sys.modules))
            (folder / f"rank-{run.comm.rank}.json").write_text(json.dumps(loaded), encoding="utf-8")


def killed(folder: Path, ranks: int, at: int) -> None:
    """Start, SIGKILL to all as soon as step `at` is in the run's own file."""
    crew = Crew(ranks, folder.parent / f"logs-{at}", ALONE)
    crew.start(train, folder, 0.1)
    while not any(row["step"] == at for row in read(folder / "metrics.jsonl")):
        assert None in crew.codes(), crew.said()
        time.sleep(0.05)
    crew.kill()
    assert set(crew.codes()) == {-9}, crew.said()
    crew.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 rank, killed; 2 ranks, killed; 1 rank, to the end."""
    folder = tmp_path_factory.mktemp("runs") / "killed twice"
    killed(folder, 1, 13)
    killed(folder, 2, 28)
    crew = Crew(1, folder.parent / "logs", ALONE)
    crew.start(train, folder, 0.0)
    assert crew.wait(200) == [0], crew.said()
    assert "did not take" not in crew.said()
    crew.close()
    return folder


def test_steps_were_made_again(run: Path) -> None:
    """Else the rest would show nothing: the kills fell behind a commit."""
    rows = [row for row in read(run / "metrics.jsonl") if "double" in row]
    for attempt in (1, 2):
        first = min(row["step"] for row in rows if row["attempt"] == attempt)
        assert first <= max(row["step"] for row in rows if row["attempt"] < attempt)


@pytest.mark.parametrize("name", ALL)
def test_it_is_one_run_with_growing_steps(run: Path, name: str) -> None:
    """And with the numbers of metrics.jsonl, those of the latest attempt for each step; it is said to be finished."""
    found: libraries.Found = getattr(libraries, name)(run)
    assert found.runs == 1
    assert found.status in ("1", "FINISHED", "exit 0")
    lines = read(run / "metrics.jsonl")
    assert found.history.keys() >= {"loss", "lr", "epoch", "samples", "grad_norm", "double", "third"}
    for number, history in found.history.items():
        steps = [step for step, _ in history]
        assert all(before < after for before, after in pairwise(steps)), number
        expected = latest(lines, number)
        exact = libraries.as_float32 if name == "tensorboard" else float
        assert history == [(step, exact(value)) for step, value in expected.items()], number
    assert len(found.history["loss"]) == STEPS


def test_only_the_process_that_writes_loads_them(run: Path) -> None:
    """B089: the other rank has none."""
    said = {rank: json.loads((run / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)}
    assert said == {0: sorted(ALL), 1: []}
