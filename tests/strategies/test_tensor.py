"""Layers in parts, alone and under data parallelism: one rank's curve, and what would not be it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from tests.strategies import decoder
from tests.strategies.decoder import PLAN, SEQUENCE, Decoder, Dropping, DroppingInAttention, Planned, ShortHeads
from tests.strategies.fitting import attempt, opened, placed
from worldsize.runtime.sharded import local

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from worldsize.strategies.base import Strategy
    from worldsize.testing.ranks import RankPool

INNER = {"layers.*.inner": "colwise"}
TORCH: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "layers.*.(first|second)".replace("*", r"\d+"): SequenceParallel(use_local_output=True),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
    r"layers\.\d+\.attention\.(q|k|v)": ColwiseParallel(),
    "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
CASES: dict[str, tuple[type[Decoder], dict[str, Any], dict[str, Any]]] = {
    "plan": (Decoder, {}, {"tp_plan": PLAN}),
    "sequence": (Decoder, {}, {"tp_plan": SEQUENCE}),
    "torch's styles": (Decoder, {}, {"tp_plan": TORCH}),
    "split losses": (Decoder, {}, {"tp_plan": SEQUENCE, "loss_parallel": True}),
    "meta, model's plan": (Planned, {"init": "meta"}, {}),
    "drop-out": (Dropping, {}, {"tp_plan": {**PLAN, **INNER}}),
    "drop-out in sequences": (Dropping, {}, {"tp_plan": {**SEQUENCE, **INNER}}),
    "recomputed": (Dropping, {"activation_checkpointing": True}, {"tp_plan": {**PLAN, **INNER}}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4},
    "ddp+tp2": {"strategy": "ddp", "tp": 2},
    "fsdp+tp2": {"strategy": "fsdp", "tp": 2},
    "hsdp+tp2": {"strategy": "hsdp", "replicas": 2, "tp": 2},
    "fsdp+tp4": {"strategy": "fsdp", "tp": 4},
}
SHOWN = {("fsdp+tp2", "split losses"), ("ddp+tp2", "plan")}
WITHIN = {"plan", "sequence", "drop-out"}
"""Cases that are part of others by default: of "recomputed", of "split losses" and "drop-out in sequences", of "recomputed"."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, one: RankPool) -> dict[str, Any]:
    """One rank's runs by case, made when asked for."""

    class Made(dict[str, Any]):
        def __missing__(self, case: str) -> dict[str, Any]:
            kind, common, _ = CASES[case]
            (self[case],) = one.run(decoder.train, tmp_path_factory.mktemp("alone"), kind, options=common)
            return dict(self[case])

    return Made()


def _check(pool: RankPool, folder: Path, case: str, wanted: dict[str, Any], **layout: Any) -> None:
    kind, common, more = CASES[case]
    for found in pool.run(decoder.train, folder, kind, options={**common, **more}, timeout=280, **layout):
        decoder.same(found, wanted)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.matrix if case in WITHIN else ()) for case in CASES]
)
def test_two_parts(case: str, tmp_path: Path, two: RankPool, alone: dict[str, Any]) -> None:
    """A whole run in float64: losses, clipped norms, rates, scores, weights, average and predictions of one rank."""
    _check(two, tmp_path, case, alone[case], tp=2)


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, marks=() if (layout, case) in SHOWN else pytest.mark.matrix)
        for layout in LAYOUTS
        for case in CASES
        if "tp4" not in layout or ("sequence" not in case and "split" not in case and "torch" not in case)
    ],
)
def test_four_ranks(layout: str, case: str, tmp_path: Path, four: RankPool, alone: dict[str, Any]) -> None:
    """The same with parts of tensors and shares of the batch. Six words do not divide over four ranks."""
    _check(four, tmp_path, case, alone[case], **LAYOUTS[layout])


@pytest.mark.parametrize(
    "layouts",
    [
        ("fsdp+tp2", "single"),
        pytest.param(("single", "fsdp+tp2"), marks=pytest.mark.matrix),
        pytest.param(("fsdp+tp2", "ddp"), marks=pytest.mark.matrix),
        pytest.param(("ddp", "tp4"), marks=pytest.mark.matrix),
        pytest.param(("tp4", "fsdp"), marks=pytest.mark.matrix),
        pytest.param(("hsdp+tp2", "tp4"), marks=pytest.mark.matrix),
        pytest.param(("tp4", "ddp+tp2"), marks=pytest.mark.matrix),
    ],
)
def test_what_one_layout_wrote_another_resumes(
    layouts: tuple[str, str], tmp_path: Path, one: RankPool, four: RankPool, alone: dict[str, Any]
) -> None:
    """Three steps in one, the rest in the other: what the undisturbed run has."""
    for layout, until in zip(layouts, (2, decoder.STEPS), strict=True):
        kind, common, more = CASES["drop-out"]
        pool, how = (one if layout == "single" else four), LAYOUTS.get(layout, {"strategy": layout})
        found = pool.run(decoder.train, tmp_path, kind, {**common, **more}, until, timeout=280, **how)[0]
    assert min(found["losses"]) == 2
    decoder.same(found, alone["drop-out"])


def _gradients(strategy: Strategy, model: nn.Module) -> None:
    ids = torch.arange(2 * decoder.LENGTH).view(2, decoder.LENGTH)
    strategy.open(model, [])
    out: Tensor = model(ids)
    functional.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
    strategy.close(model)


def _told() -> dict[str, str]:
    """What is said of models whose curve would not be one rank's."""
    forgotten = {name: word for name, word in SEQUENCE.items() if name != "layers.*.first"}
    cases: dict[str, tuple[type[Decoder], dict[str, Any]]] = {
        "forgotten": (Decoder, forgotten),
        "drop-out": (Dropping, PLAN),
        "attention": (DroppingInAttention, PLAN),
        "tied": (Decoder, {"embed": "colwise", "head": "colwise_rep"}),
        "heads": (ShortHeads, PLAN),
        "fine": (Decoder, SEQUENCE),
    }
    strategy, found = opened("single", tp=2), {}
    for name, (kind, plan) in cases.items():
        found[name] = attempt(lambda kind=kind, plan=plan: _gradients(strategy, placed(strategy, kind, tp_plan=plan)))  # type: ignore[misc]
    found["compile"] = attempt(lambda: placed(strategy, Decoder, tp_plan=PLAN, compile={"backend": "aot_eager"}))
    found["horovod"] = attempt(lambda: opened("horovod", tp=2))
    return found


def test_what_would_not_be_one_ranks_curve_is_refused(two: RankPool) -> None:
    """A norm on a part of the sequence that the plan forgets, drop-out on parts, ties laid in two ways."""
    found = two.run(_told)[0]
    assert found["fine"] == "passed"
    assert "layers.0.first.weight, layers.0.first.bias" in found["forgotten"]
    assert "dropout on (2, 6, 24)" in found["drop-out"]
    assert "scaled_dot_product_attention on (2, 2, 6, 4)" in found["attention"]
    assert "embed and head" in found["tied"]
    assert "attention over heads of 2, of 4 in one rank's model" in found["heads"]
    assert "tp=2, cp=1. Do: use tp and cp with single, ddp, fsdp, hsdp" in found["horovod"]
    assert "tp=2. Do: leave compile out" in found["compile"]


def test_one_share_is_not_two(four: RankPool) -> None:
    """Strategy single with tp=2 on four ranks has nobody to sum gradients with."""
    assert "choose ddp, fsdp or hsdp" in four.run(_two_shares)[0]


def _two_shares() -> str:
    return attempt(lambda: opened("single", tp=2))


def _foreach() -> tuple[list[Any], bool]:
    strategy = opened("single", tp=2)
    model = placed(strategy, Decoder, tp_plan=PLAN)
    made = torch.optim.AdamW(model.parameters(), foreach=True)
    before = model.get_parameter("norm.weight").detach().clone()
    optimizer = strategy.adopt(made, [model], None)
    _gradients(strategy, model)
    optimizer.step()
    return [group["foreach"] for group in optimizer.param_groups], torch.equal(
        before, model.get_parameter("norm.weight")
    )


def test_an_optimizer_of_both_kinds_moves_one_by_one(two: RankPool) -> None:
    """Parts and whole parameters cannot go into one kernel; the program's setting stays what it was."""
    assert two.run(_foreach) == [([True], False)] * 2


def _parts() -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    model = placed(opened("single", tp=2), Planned, init="meta")
    head, embed = model.get_parameter("head.weight"), model.get_parameter("embed.weight")
    down = local(model.get_parameter("layers.0.down.weight"))
    return tuple(local(head).shape), head is embed, tuple(down.shape)


def test_each_rank_holds_its_part_and_ties_hold(two: RankPool) -> None:
    """Half of the vocabulary, once; half of the columns."""
    assert two.run(_parts) == [((10, 16), True, (16, 24))] * 2
