"""Shards within a host, copies between hosts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.distributed.tensor import DTensor

from tests.strategies import decoder, fitting
from tests.strategies.models import CASES, Blocks
from worldsize.runtime import session
from worldsize.strategies.base import Setting
from worldsize.strategies.fsdp import HSDP
from worldsize.strategies.precision import Precision
from worldsize.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.ranks import RankPool

NAMES = [name for name, case in CASES.items() if 2 in case.ranks]


@pytest.fixture(scope="module")
def both(one: RankPool, two: RankPool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one rank makes of every case, and what two copies do."""
    copies = two.run(fitting.fit_all, "hsdp", 2, replicas=2, timeout=280)[0]
    return one.run(fitting.fit_all, "single", 1, timeout=280)[0], copies


@pytest.mark.parametrize("case", NAMES)
def test_copies_of_one_shard_train_as_one_rank(case: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Every kind of model has one rank's losses, norms and final state."""
    wanted, found = (each[case] for each in both)
    assert isinstance(found, dict), found
    for what in ("losses", "norms"):
        np.testing.assert_allclose(found[what], wanted[what], rtol=1e-12)
    for key, value in wanted["state"].items():
        np.testing.assert_allclose(found["state"][key], value, rtol=0, atol=1e-12, err_msg=key)


def test_two_copies_of_two_shards(tmp_path: Path, one: RankPool, four: RankPool) -> None:
    """A whole run on a 2 x 2 grid is that of one rank."""
    (wanted,) = one.run(decoder.train, tmp_path / "one")
    for found in four.run(decoder.train, tmp_path / "four", strategy="hsdp", replicas=2):
        decoder.same(found, wanted)


def _layout() -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    strategy = fitting.opened("hsdp", replicas=2)
    weight = fitting.placed(strategy, Blocks).get_parameter("head.weight")
    assert isinstance(weight, DTensor)
    return tuple(weight.device_mesh.shape), tuple(weight.to_local().shape), strategy.layout()


def test_each_copy_lies_over_neighbouring_ranks(four: RankPool) -> None:
    """Three rows over two ranks, twice; the layout is written as it is."""
    found = four.run(_layout)
    assert [shape for _, shape, _ in found] == [(2, 6), (1, 6), (2, 6), (1, 6)]
    assert found[0][0] == (2, 2)
    assert found[0][2]["mesh"] == {"dp_replicate": 2, "dp_shard": 2}


def test_there_is_one_copy_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no number is given, the hosts are counted."""
    world = World(rank=5, size=8, local_rank=1, local_size=4, node=1, nodes=2)
    real = session.session("cpu")
    monkeypatch.setattr(type(real), "need_group", lambda _: None)
    grid = HSDP(Setting(dataclasses.replace(real, world=world), Precision.of("fp32"))).grid
    session.close()
    assert grid.written() == {"dp_replicate": 2, "dp_shard": 4}
    assert (grid.where("dp_replicate"), grid.where("dp_shard")) == (1, 1)


def _refused() -> list[str]:
    return [
        fitting.attempt(lambda: fitting.opened("hsdp", replicas=2 + 1)),
        fitting.attempt(lambda: fitting.opened("fsdp", replicas=2)),
    ]


def test_numbers_that_do_not_divide_are_told(two: RankPool) -> None:
    """Both numbers are in the message; replicas of another strategy are refused."""
    divide, foreign = two.run(_refused)[0]
    assert "2 shares of the batch, 3 replicas" in divide
    assert "use hsdp" in foreign
