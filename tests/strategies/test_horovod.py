"""Horovod's own promises; what every strategy must keep is in the parity tests."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration import program
from tests.pools import pool
from tests.strategies.fitting import Fit, attempt, micro, opened, placed
from tests.strategies.models import Blocks, Unused, plain, sometimes
from worldsize.runtime import env, session
from worldsize.runtime.comm import Alone
from worldsize.runtime.grid import Sizes
from worldsize.strategies import horovod
from worldsize.strategies.base import Setting
from worldsize.strategies.precision import Precision
from worldsize.testing.ranks import RankPool
from worldsize.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


pytestmark = pytest.mark.horovod


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> program.Curve:
    """What one process does in two epochs."""
    return program.everyone(pool(1).run(program.train, tmp_path_factory.mktemp("single"), "single:1"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_is_that_of_one_process(ranks: int, tmp_path: Path, single: program.Curve) -> None:
    """Accumulation, clipping, rates, and a ragged last batch in which one of four ranks is idle: 1e-10 in float64."""
    found = program.everyone(pool(ranks).run(program.train, tmp_path, f"horovod:{ranks}"))
    assert len(found.losses) == 2 * program.STEPS_PER_EPOCH
    program.close(single, found, 1e-10)


@pytest.mark.parametrize(
    ("writer", "reader"), [("horovod:2", "ddp:3"), ("ddp:2", "horovod:3"), ("fsdp:2", "horovod:2")]
)
def test_its_checkpoints_are_those_of_the_others(
    writer: str, reader: str, tmp_path: Path, single: program.Curve
) -> None:
    """Written by one and read by the other in the middle of an epoch: samples, rates, losses and weights go on."""
    curves = [
        program.everyone(pool(program.ranks_of(layout)).run(program.train, tmp_path, layout, **settings))
        for layout, settings in ((writer, {"stop_after": 3}), (reader, {}))
    ]
    assert [list(curve.losses) for curve in curves] == [[0, 1, 2], list(range(3, 2 * program.STEPS_PER_EPOCH))]
    for curve in curves:
        program.close(single, curve, 1e-10)


def _twice() -> list[list[float]]:
    strategy, found = opened("horovod", "fp32"), []
    for _ in range(2):
        made = Fit(strategy, placed(strategy, Blocks, bucket_mb=0.0005))
        for index in range(4):
            made.step(index)
        found.append(_flat(made.model))
    return found


def test_the_order_of_summation_is_the_same_in_every_run(three: RankPool) -> None:
    """Three ranks, several buckets, twice, bit for bit: Horovod fuses nothing by what happens to be ready."""
    for first, second in three.run(_twice):
        assert first == second


def _buckets() -> tuple[int, int]:
    strategy = opened("horovod")
    assert isinstance(strategy, horovod.Horovod)
    made = Fit(strategy, placed(strategy, Blocks, bucket_mb=0.0005))
    sums = strategy._sums[made.model]
    strategy.exchange(made.model, last=True)
    x, y = micro(0, strategy.rank)
    plain(made.model, x, y, 0).sum().backward()
    flying = sum(bucket.handle is not None for bucket in sums._buckets)
    strategy.sent(made.model)
    return flying, len(sums._buckets)


def test_gradients_travel_during_the_backward_pass(two: RankPool) -> None:
    """Every bucket is on its way before the strategy is told that the pass has ended."""
    for flying, buckets in two.run(_buckets):
        assert flying == buckets > 2


def _own_data() -> tuple[list[float], list[float], list[float]]:
    """One step of plain gradient descent: this rank's gradients alone, those of all, and the weights afterwards."""
    strategy = opened("horovod")
    made = Fit(strategy, placed(strategy, Blocks))
    made.micro(0, strategy.rank, last=False)
    own = _gradients(made.model)
    made.model.zero_grad()
    made.micro(0, strategy.rank, last=True)
    torch.optim.SGD(made.model.parameters(), lr=0.5).step()
    return own, _gradients(made.model), _flat(made.model)


def test_ranks_with_different_data_end_with_the_sum(two: RankPool) -> None:
    """Each rank's gradients differ, the exchanged ones are their sum on both, and so the weights are equal."""
    (own, total, weights), (other, second, again) = two.run(_own_data)
    assert own != other
    assert total == second == [a + b for a, b in zip(own, other, strict=True)]
    assert weights == again


def _sometimes_used() -> tuple[list[str], list[float]]:
    strategy = opened("horovod")
    made = Fit(strategy, placed(strategy, Unused, unused_parameters="allow"), sometimes)
    made.micro(0, strategy.rank, last=True)
    assert strategy.check_gradients(made.model) == []
    return strategy.without_gradient(made.model), _gradients(made.model)


def test_what_no_rank_uses_gets_no_gradient_and_what_one_uses_gets_it_everywhere(two: RankPool) -> None:
    """So an optimizer with weight decay leaves alone what it would on one rank, and no rank waits for another."""
    first, second = two.run(_sometimes_used)
    assert first[0] == second[0] == ["never.weight", "never.bias"]
    assert first[1] == second[1]


def _missing() -> list[str]:
    strategy = opened("horovod")
    made = Fit(strategy, placed(strategy, Unused), sometimes)
    made.micro(0, strategy.rank, last=True)
    return strategy.check_gradients(made.model)


def test_a_rank_that_misses_a_gradient_names_it_and_holds_nobody_up(two: RankPool) -> None:
    """Both ranks come through the exchange; the one that used less names more (B068)."""
    first, second = two.run(_missing)
    assert first == ["never.weight", "never.bias"]
    assert second == ["never.weight", "never.bias", "sometimes.weight", "sometimes.bias"]


def _last_misses() -> list[float]:
    strategy = opened("horovod")
    made = Fit(strategy, placed(strategy, Blocks))
    made.micro(0, strategy.rank, last=False)
    strategy.exchange(made.model, last=True)
    torch.ones((), requires_grad=True).backward()
    strategy.sent(made.model)
    assert strategy.check_gradients(made.model) == []
    return _gradients(made.model)


def test_a_last_micro_batch_that_misses_the_model_loses_nothing(two: RankPool) -> None:
    """What earlier ones gave is exchanged all the same."""
    first, second = two.run(_last_misses)
    assert first == second
    assert any(first)


def _late(where: str) -> str:
    strategy = opened("horovod")
    model = placed(strategy, Blocks)
    x, _ = micro(0, strategy.rank)

    def call() -> None:
        strategy.exchange(model, last=True)
        out = model(x)
        out[:, 0].sum().backward(retain_graph=True)
        if where == "before":
            out[:, 1].sum().backward(retain_graph=True)
        strategy.sent(model)
        out[:, 1].sum().backward()
        strategy.check_gradients(model)

    return attempt(call)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_second_backward_of_the_last_micro_batch_is_refused(where: str) -> None:
    """Before or after the exchange has ended: its gradients would be this rank's own."""
    for said in pool(2).run(_late, where):
        assert "add losses up before one step.backward" in said


def _sparse() -> str:
    strategy = opened("horovod")
    return attempt(lambda: placed(strategy, lambda: torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))))


def test_sparse_gradients_are_refused_by_name(two: RankPool) -> None:
    """Before anything is trained."""
    assert all("sparse=True in 0" in said for said in two.run(_sparse))


def _started() -> tuple[list[str], str]:
    strategy = opened("horovod")
    strategy.setting.session.comm.barrier()
    return sorted(name for name in env.read() if name.startswith("HOROVOD_")), strategy.name


def test_nothing_of_its_start_is_left_in_the_environment(two: RankPool) -> None:
    """A child of a rank would take the variables for its own."""
    assert two.run(_started) == [([], "horovod")] * 2


def _not_installed() -> str:
    if session.session("cpu").comm.rank == 1:
        sys.modules["horovod"] = None  # type: ignore[assignment] # what import finds where there is no such package
    try:
        return attempt(lambda: opened("horovod"))
    finally:
        if sys.modules.get("horovod", "") is None:
            del sys.modules["horovod"]


def test_a_host_without_it_is_told_on_every_rank() -> None:
    """With where to get it; nobody waits for a rank that cannot come."""
    with RankPool(2) as fresh:  # in which none has imported it yet
        for said in fresh.run(_not_installed):
            assert said.startswith("ConfigError: Horovod cannot be imported: ")
            assert "make engines" in said


def test_a_build_without_nccl_does_not_train_on_gpus() -> None:
    """The build for CPUs says so where CUDA is asked for."""
    hvd, problem = horovod._library("cpu")
    assert problem is None
    told = None if hvd.nccl_built() else "is built without NCCL, and this training runs on GPUs"
    assert horovod._library("cuda")[1] == told


class _Build:
    """A Horovod that is built with these controllers."""

    def __init__(self, *built: str) -> None:
        self.gloo_built = lambda: "gloo" in built
        self.mpi_built = lambda: "mpi" in built


@pytest.mark.parametrize(
    ("launcher", "build", "controller", "told"),
    [
        ("openmpi", ("gloo",), None, False),
        ("openmpi", ("gloo", "mpi"), None, True),
        ("pmi", ("mpi",), None, True),
        ("openmpi", ("gloo", "mpi"), "gloo", False),
        ("openmpi", ("gloo", "mpi"), "MPI", True),
        ("slurm", ("gloo", "mpi"), None, False),
    ],
)
def test_mpi_tells_ranks_where_horovod_is_built_for_it(
    launcher: str, build: tuple[str, ...], controller: str | None, told: bool
) -> None:
    """Under mpirun and mpiexec only, and not where gloo is asked for; else we say who is who."""
    environ = {} if controller is None else {"HOROVOD_CONTROLLER": controller}
    assert horovod._has_ranks(_Build(*build), World(0, 2, 0, 2, launcher=launcher), environ) is told


@pytest.mark.parametrize(
    ("build", "asked", "refused"),
    [(("gloo",), "mpi", True), (("mpi",), "gloo", True), (("gloo",), "nccl", True), (("gloo",), "", False)],
)
def test_a_controller_that_is_not_built_is_refused(build: tuple[str, ...], asked: str, refused: bool) -> None:
    """Before Horovod starts, which would end in a segmentation fault."""
    said = horovod._not_built(_Build(*build), {"HOROVOD_CONTROLLER": asked})
    assert (said is not None) is refused
    assert f"HOROVOD_CONTROLLER={asked} " in (said or "HOROVOD_CONTROLLER= ")


def _miscounted() -> str:
    strategy = opened("horovod")
    alone = replace(strategy.setting.session, world=World(), comm=Alone())
    return attempt(lambda: horovod.join(alone))


def test_another_count_of_ranks_is_refused_with_both(two: RankPool) -> None:
    """A launcher that started one process, in a Horovod of two."""
    said = two.run(_miscounted)
    assert "rank 0 of 1 by the launcher, rank 1 of 2 by Horovod" in said[1]


def _tensor_parts() -> str:
    return attempt(lambda: horovod.Horovod(Setting(session.session("cpu"), Precision.of("fp32"), sizes=Sizes(tp=2))))


def test_it_splits_no_model(two: RankPool) -> None:
    """Asked for tensor parts it says that it holds whole models."""
    assert all("whole model on each rank. Found: tp=2, pp=1, cp=1" in said for said in two.run(_tensor_parts))


def _flat(model: nn.Module) -> list[float]:
    return [number for value in model.parameters() for number in value.detach().flatten().tolist()]


def _gradients(model: nn.Module) -> list[float]:
    grads = [value.grad for value in model.parameters() if value.grad is not None]
    return [number for grad in grads for number in grad.flatten().tolist()]
