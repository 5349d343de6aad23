"""Room: models in stages over real ranks: the curve of one rank, whatever the model, the schedule and the shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.strategies import chains
from tests.strategies.chains import Task, Unit, numbers, ran, said
from worldsize.strategies.pipeline.halves import divisible
from worldsize.strategies.pipeline.order import SCHEDULES, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

PP = {"pp": 2}
SAYER = Task(chains.Sayer, chains.texts, chains.following)


@cache
def _alone(name: str) -> dict[str, Any]:
    """What one rank does in a task of this name."""
    return ran({"written": Task(), "sayer": SAYER}[name], 1)[0]


def _same(task: Task, found: list[dict[str, Any]], wanted: Mapping[str, Any]) -> None:
    for each in found:
        np.testing.assert_allclose(numbers(each), numbers(wanted), rtol=1e-10, atol=1e-12, err_msg=str(task))


@pytest.mark.parametrize("schedule", ["gpipe", "interleavedzerobubble", "zbvzerobubble"])
def test_a_class_that_is_a_chain_keeps_its_curve(schedule: str) -> None:
    """Losses, norms, weights, running statistics and an evaluation, with a ragged last micro-batch in each epoch."""
    task = Task(sizes=PP, options={"schedule": schedule})
    _same(task, ran(task, 2), _alone("written"))


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbvzerobubble"])
def test_a_backward_pass_in_halves_goes_through_functions_of_ones_own(schedule: str) -> None:
    """Nodes written in Python live as long as their second half needs them."""
    task = Task(chains.Custom)
    _same(task, ran(replace(task, sizes=PP, options={"schedule": schedule}), 2), ran(task, 1)[0])


@pytest.mark.parametrize("schedule", ["1f1b", "interleavedzerobubble"])
def test_a_program_may_compile_parts_of_its_stages(schedule: str) -> None:
    """Shapes are found without what was compiled: it would take the addresses of tensors without memory."""
    task = Task(chains.Compiled)
    _same(task, ran(replace(task, sizes=PP, options={"schedule": schedule}), 2), ran(task, 1)[0])


@pytest.mark.parametrize("init", ["here", "meta"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleavedzerobubble", "zbvzerobubble"])
def test_stages_may_share_a_weight(schedule: str, init: str) -> None:
    """On two ranks, or on one that has both ends: gradients are summed, and counted once."""
    task = Task(chains.Tied)
    found = ran(replace(task, sizes=PP, options={"schedule": schedule, "init": init}), 2)
    _same(task, found, ran(replace(task, options={"init": init}), 1)[0])
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["weights"]["0.weight"] == found[0]["weights"]["3.weight"]


@pytest.mark.parametrize("layout", [{"strategy": "ddp"}, {"strategy": "fsdp"}])
def test_shards_of_a_weight_may_be_shared(layout: dict[str, str]) -> None:
    """Each end of the pipeline has its own over ranks that have the same stage."""
    task = Task(chains.Tied)
    _same(task, ran(replace(task, sizes=PP | layout, options={"schedule": "1f1b"}), 4), ran(task, 1)[0])


def test_a_compiled_pass_is_not_halved() -> None:
    """Its backward pass is one function."""
    unit, x = Unit().double(), torch.ones(2, chains.WIDTH, dtype=torch.float64)
    assert divisible([unit(x)])
    unit.compile(backend="aot_eager")
    assert not divisible([unit(x)])


def test_a_function_that_calls_the_model_may_be_compiled() -> None:
    """Shapes are found without its compiler's knowledge."""
    task = Task(loss=chains.compiled, sizes=PP)
    _same(task, ran(task, 2), _alone("written"))


@pytest.mark.parametrize("layout", [{"strategy": "ddp"}, {"strategy": "fsdp"}])
def test_stages_are_laid_over_ranks_by_another_strategy(layout: dict[str, str]) -> None:
    """Two stages of two ranks each; in the last step of an epoch one of them has nothing to do (B069)."""
    task = Task(sizes=PP | layout, options={"schedule": "1f1b"})
    _same(task, ran(task, 4), _alone("written"))


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_a_stage_may_be_frozen(strategy: str | None) -> None:
    """No backward pass goes through it: its weights stay in their shards, and the norm is no less exact where it lies."""
    task = Task(chains.Still, steps=4)
    wanted = ran(task, 1)[0]
    layout = replace(task, sizes=PP | {"strategy": strategy}, options={"split": ["units.1"]})
    _same(task, ran(layout, 4 if strategy else 2), wanted)


def test_each_rank_holds_its_own_stages_only() -> None:
    """Names, class and the parameters to train: a part of the whole on each rank, and no part twice."""
    first, last = ran(Task(sizes=PP), 2)
    assert first["kind"] == last["kind"] == "Written"
    assert not set(first["names"]) & set(last["names"])
    assert {*first["names"], *last["names"]} == set(_alone("written")["names"])
    assert (first["trained"], last["trained"]) == (len(first["names"]), len(last["names"]))


@pytest.mark.parametrize("schedule", ["1f1b", "zbvzerobubble"])
def test_a_model_that_says_its_stages(schedule: str) -> None:
    """Tuples with whole numbers between stages, a dict at the end, and another length of sequences in every batch (B082)."""
    stages = {"schedule": schedule} if schedule == "1f1b" else {"schedule": "gpipe", "stages": 2}
    task = replace(SAYER, sizes=PP, options=stages)
    _same(task, ran(task, 2), _alone("sayer"))


def test_ten_samples_in_batches_of_four() -> None:
    """Three steps of two micro-batches of two, the last of one: nothing is dropped, nothing counts twice (B082)."""
    task = Task(data=_ten, batch=(4, 2), steps=6)
    alone = ran(task, 1)[0]
    for schedule in ("1f1b", "interleaved1f1b"):
        _same(task, ran(replace(task, sizes=PP, options={"schedule": schedule}), 2), alone)


def test_eight_samples_in_micro_batches_of_three() -> None:
    """Three, three and two: nothing has to divide, so nothing is refused, and the loss is that of one rank (B082)."""
    task = Task(data=_eight, batch=(8, 3), steps=3)
    alone = ran(task, 1)[0]
    for schedule in SCHEDULES:
        _same(task, ran(replace(task, sizes=PP, options={"schedule": schedule}), 2), alone)


def _ten() -> Any:
    return chains.rows(10)


def test_drop_out_is_one_for_all_pipelines() -> None:
    """Random numbers come from the path of the module and the micro-batch: neither schedule nor ranks decide them."""
    task = Task(chains.Dropping, sizes=PP, options={"schedule": "gpipe"})
    wanted = ran(task, 2)[0]
    found = ran(replace(task, options={"schedule": "zbvzerobubble"}), 2)
    _same(task, found, wanted)
    assert found[0]["losses"] != _alone("written")["losses"]


OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"split": ["tail"]},
    "time": {"balance": "time", "sample": chains.rows(1)[0][0].expand(4, chains.WIDTH)},
    "recomputed": {"activation_checkpointing": (Unit,), "schedule": "interleavedzerobubble"},
    "stages": {"stages": 4, "schedule": "loopedbfs"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_nothing_in_the_curve(name: str) -> None:
    """Where it is cut, and what is computed twice."""
    task = Task(sizes=PP, options=OPTIONS[name])
    _same(task, ran(task, 2), _alone("written"))


def test_a_split_is_where_it_was_asked_for() -> None:
    """The second stage begins with the module that was named."""
    _, last = ran(Task(sizes=PP, options={"split": ["tail.1"]}, steps=1), 2)
    assert last["names"] == ["tail.1.weight", "tail.1.bias"]


def test_stages_are_filled_where_they_lie() -> None:
    """Built without memory: the same weights as on one rank."""
    task = Task(options={"init": "meta"})
    alone = ran(task, 1)[0]
    _same(task, ran(replace(task, sizes=PP), 2), alone)


def test_few_bits_between_stages() -> None:
    """Under bf16 a pipeline stays as near to one rank as bf16 is exact."""
    task = Task(precision="bf16")
    alone = ran(task, 1)[0]
    for each in ran(replace(task, sizes=PP), 2):
        np.testing.assert_allclose(each["losses"], alone["losses"], rtol=2e-2)


def _lonely() -> nn.Module:
    return nn.Sequential(nn.Linear(chains.WIDTH, 3), nn.Tanh())


REFUSED = {
    "residual": (Task(chains.Residual), "no chain", "after 'tail.1' its forward computes something"),
    "order": (Task(chains.Backwards), "no chain", "calls 'first' after 'units.0'"),
    "tied": (
        Task(chains.Tied, sizes={"strategy": "fsdp"}, options={"schedule": "zbvzerobubble"}),
        "share parameters on one rank",
        "0.weight",
    ),
    "loose": (Task(chains.Loose), "outside of the modules", "scale"),
    "few": (Task(_lonely), "fewer modules with parameters", "1 modules in a row, 2 stages"),
    "schedule": (Task(options={"schedule": "gpip"}), "'gpip' is not known", "gpipe"),
    "stages": (
        Task(options={"schedule": "zbvzerobubble", "stages": 6}),
        "needs 2 stages on each rank",
        "6 stages, pp=2",
    ),
    "many": (Task(options={"stages": 16, "schedule": "loopedbfs"}), "fewer modules with parameters", "7 modules"),
    "split": (Task(options={"split": ["head"]}), "split must name modules", "'head'"),
    "splits": (Task(options={"split": ["norm", "tail"]}), "every stage but the first", "2 names for 2 stages"),
    "balance": (Task(options={"balance": "time"}), "balance='time' measures", "no sample"),
    "bound": (Task(chains.Bound), "compiled without the module", "norm"),
    "values": (Task(chains.Picky), "depend on values", ""),
    "horovod": (Task(sizes={"strategy": "horovod"}), "whole models only", "pp=2"),
    "deepspeed": (Task(sizes={"strategy": "deepspeed"}), "whole models only", "pp=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_pipeline_is_refused(name: str) -> None:
    """With what was found, on every rank, before the first step."""
    task, *words = REFUSED[name]
    for found in said(replace(task, sizes=PP | dict(task.sizes))):
        assert all(word in found for word in words), found


@pytest.mark.parametrize("plan", [{"0": "colwise_rep"}, {"0": "colwise_rep", "3": "rowwise_rep"}])
def test_a_weight_that_stages_share_lies_in_one_way(plan: dict[str, str]) -> None:
    """Parts of it on the tensor ranks of one stage do not fit to other parts, or the whole, on those of another."""
    task = Task(chains.Tied, sizes={"pp": 2, "tp": 2}, options={"tp_plan": plan, "schedule": "1f1b"})
    for found in said(task, 4):
        assert "stages share a weight, and the tp plan lays it in two ways" in found, found
        assert "0.weight: " in found, found


@pytest.mark.parametrize("name", SCHEDULES)
def test_inputs_made_inside_the_loop(name: str) -> None:
    """Inputs that are no tensors of the batch work where the order can wait for them, and are refused where it cannot."""
    task = Task(loss=_halved, sizes=PP, options={"schedule": name}, data=_eight, steps=2)
    for found in said(task):
        if name == "zbvzerobubble":
            assert "first and the last stage on one rank" in found, found
        else:
            assert found == "passed"


def _eight() -> Any:
    return chains.rows(8)


def _halved(model: nn.Module, batch: Any) -> Any:
    return chains.label(model, (batch[0] / 2, batch[1]))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("micros", [1, 2, 5, 8])
def test_transfers_are_in_one_order_for_all_ranks(name: str, micros: int) -> None:
    """Everything is done once, and ranks that begin their next transfer only after the one before never wait for ever."""
    made = Schedule(name, 4, None)
    orders = [made.order(rank, micros) for rank in range(4)]
    for kind in ("F", "send F", "receive F", "send B", "receive B"):
        done = [action for order in orders for action in order if action.kind == kind]
        assert len(done) == len(set(done))
    assert sum(action.kind == "F" for order in orders for action in order) == made.stages * micros
    lines = [
        [(action.stage, action.micro, action.kind[-1]) for action in order if " " in action.kind] for order in orders
    ]
    while any(lines):
        heads = [line[0] for line in lines if line]
        met = next(head for head in heads if heads.count(head) == 2)
        lines = [line[1:] if line and line[0] == met else line for line in lines]
