"""Ranks that wait for one another: long where there is a reason, and not for ever where there is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

import worldsize as ws
from tests.pools import pool
from tests.train import small
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def prepared(folder: Path, duration: str) -> tuple[float, list[float]]:
    """Rank 0 makes the data before its Run, unless it is there; the others go straight to theirs. Seconds, losses."""
    began, cache = time.monotonic(), folder / "data.pt"
    if ws.here().rank == 0 and not cache.exists():
        time.sleep(8)
        torch.save(small.data().tensors, cache)
    run = small.make(folder / "run", timeout=3.0, duration=duration)
    model, _ = small.parts(run)
    data = torch.utils.data.TensorDataset(*torch.load(cache))
    losses = [float(step.loss) for step in small.steps(run, model, data)]
    return time.monotonic() - began, losses


def test_one_rank_may_prepare_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    """B074: eight seconds with a timeout of three; the second start finds the data and takes no such time."""
    for took, losses in pool(2).run(prepared, tmp_path, "1ep"):
        assert (took > 8, len(losses)) == (True, 3)
    for took, losses in pool(2).run(prepared, tmp_path, "2ep"):
        assert (took < 8, len(losses)) == (True, 3)


def test_a_sharded_run_that_saves_every_step_ends_soon(tmp_path: Path) -> None:
    """B061: the state of two FSDP ranks is gathered by both, at each step."""
    began = time.monotonic()
    pool(2).run(small.train, tmp_path, strategy="fsdp", saving=small.OFTEN)
    assert time.monotonic() - began < 30


def lonely(folder: Path) -> None:
    """Only rank 0 asks for the whole model, as in `if rank == 0: save(model.state_dict())`."""
    run = small.make(folder, strategy="fsdp", timeout=3.0)
    model, _ = small.parts(run)
    for _step in small.steps(run, model):
        if run.comm.rank == 0:
            run.whole(model)


def test_asking_for_the_whole_model_on_one_rank_ends(tmp_path: Path) -> None:
    """B061: an error within the timeout, on whichever rank it comes first, instead of a wait for ever."""
    began = time.monotonic()
    with pytest.raises((RuntimeError, CheckpointError)):
        pool(2).run(lonely, tmp_path)
    assert time.monotonic() - began < 30
