"""Replicas that should be alike: one flipped bit is found, and whose it is, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import worldsize as ws
from tests.pools import pool
from tests.train import small
from worldsize.checkpoint import manifest
from worldsize.errors import StepError
from worldsize.runtime.sharded import local
from worldsize.train import digest

if TYPE_CHECKING:
    from pathlib import Path


class Deep(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(2), nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        found: torch.Tensor = self.down(torch.relu(self.up(self.norm(x)))).squeeze(1)
        return found


def flip(value: torch.Tensor, bit: int = 3) -> None:
    """One bit of its first number."""
    part = local(value.detach()).view(torch.int64).view(-1)
    part[0] ^= 1 << bit


def train(folder: Path, name: str, rank: int | None, **settings: Any) -> str:
    """A training in which one rank's parameter is flipped after step 2. Returns what is said of it."""
    said: dict[str, Any] = {"strategy": "ddp", "digest_every": 2, "saving": ws.Saving(every=None), "duration": "8st"}
    said |= settings
    run = small.make(folder, **said)
    model = run.model(Deep, tp_plan={"up": "colwise", "down": "rowwise"}) if said.get("tp") else run.model(Deep)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.01), model)
    try:
        for step in small.steps(run, model):
            if step.index == 2 and run.comm.rank == rank:
                flip(dict(model.named_parameters())[name])
    except StepError as error:
        return str(error)
    finally:
        run.close()
    return ""


@pytest.mark.parametrize(
    ("where", "name", "bad", "who"),
    [
        ((3, {}), "up.weight", 1, "rank 1. Found: parameter 'model.up.weight': rank 1 of 3 that hold it"),
        ((2, {}), "norm.bias", 0, "ranks 0, 1. Found: parameter 'model.norm.bias': ranks 0, 1 differ, and it cannot"),
        pytest.param(
            (4, {"strategy": "hsdp", "replicas": 2}),
            "up.weight",
            3,
            "ranks 1, 3 differ, and it cannot be told",
            marks=pytest.mark.matrix,
        ),
        pytest.param((3, {"strategy": "horovod"}), "down.weight", 2, "rank 2 of 3", marks=pytest.mark.matrix),
        pytest.param((2, {"tp": 2}), "norm.weight", 1, "cannot be told", marks=pytest.mark.matrix),
    ],
)
def test_a_flipped_bit_is_named(
    tmp_path: Path, where: tuple[int, dict[str, Any]], name: str, bad: int, who: str
) -> None:
    """Within the period: the rank where most agree, both of two, and the parameter."""
    ranks, settings = where
    said = pool(ranks).run(train, tmp_path / "run", name, bad, **settings)
    assert all(who in text and "at step 4" in text for text in said), said


def test_weights_that_differ_are_not_committed(tmp_path: Path) -> None:
    """Each commit compares them too, whatever the period: the newest checkpoint is from before the fault."""
    often: dict[str, Any] = {"saving": ws.Saving(every="1st", synchronous=True), "digest_every": 1000}
    said = pool(2).run(train, tmp_path / "run", "norm.bias", 0, **often)
    assert all("at step 3" in text for text in said), said
    assert [manifest.step_of(path) for path in manifest.committed(tmp_path / "run")][-1] == 2


def test_nothing_is_said_of_replicas_that_agree(tmp_path: Path) -> None:
    """Compared at every step, and under never."""
    assert pool(2).run(train, tmp_path / "a", "", None, digest_every=1) == ["", ""]
    assert pool(2).run(train, tmp_path / "b", "norm.bias", 0, digest_every=None) == ["", ""]


@given(
    st.binary(min_size=24, max_size=24),
    st.integers(0, 191),
    st.sampled_from([torch.float64, torch.float32, torch.int8]),
)
def test_any_bit_changes_the_digest(content: bytes, bit: int, dtype: torch.dtype) -> None:
    """Of numbers, NaN and infinity among them, of any size; the order in which they lie does not."""
    value = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    flipped = value.clone()
    flipped[bit // 8] ^= 1 << bit % 8
    before = digest.digest(value.view(dtype))
    assert digest.digest(flipped.view(dtype)) != before
    assert digest.digest(value.view(dtype).flip(0)) == before


def test_a_part_is_compared_with_its_own_kind() -> None:
    """Ranks hold other parts of a parameter, and share some."""
    parts = [["a", "b[0]"], ["a", "b[1]"], ["a", "b[0]"], ["a", "b[1]"]]
    assert digest.disagreements(parts, [[1, 5], [1, 6], [1, 5], [1, 7]]) == {"b[1]": [(6, [1]), (7, [3])]}
    assert digest.outvoted([(6, [1]), (7, [3])]) == [1, 3]
    assert digest.outvoted([(6, [0, 1]), (7, [3]), (8, [2])]) == [2, 3]
