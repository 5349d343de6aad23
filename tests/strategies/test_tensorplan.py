"""Which modules a plan splits, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.strategies.decoder import PLAN, SEQUENCE, Decoder, Dropping, Planned
from worldsize.errors import ConfigError, LayoutError
from worldsize.strategies.tensorplan import WORDS, carried, resolve

if TYPE_CHECKING:
    from collections.abc import Callable


def build(kind: Callable[..., nn.Module] = Decoder, **more: Any) -> nn.Module:
    """A model without memory."""
    with torch.device("meta"):
        return kind(**more)


def test_a_star_is_one_part_of_a_path_and_anything_else_an_expression() -> None:
    """Both kinds of names reach every layer."""
    found = resolve(build(), PLAN, 2)
    assert found["layers.1.attention.k"] == "colwise"
    assert found["layers.0.down"] == "rowwise"
    assert len(found) == 2 + 2 * 6


def test_torchs_own_styles_are_taken_as_they_are() -> None:
    """A ParallelStyle object is a value too."""
    style = ColwiseParallel()
    assert resolve(build(), {"layers.*.up": style}, 2)["layers.0.up"] is style


@pytest.mark.parametrize("kind", ["attribute", "method", "property"])
def test_a_model_carries_its_plan(kind: str) -> None:
    """As attribute, method or property."""
    model = build(Planned)
    if kind == "attribute":
        model = build()
        model.tp_plan = PLAN  # type: ignore[assignment]
    elif kind == "property":
        model = build(type("Kind", (Decoder,), {"tp_plan": property(lambda _: PLAN)}))
    assert resolve(model, None, 2)["layers.0.attention.q"] == "colwise"


def test_the_plan_of_transformers_is_translated() -> None:
    """Its config speaks of the inner model, its class of the outer one, and some of its words are others."""
    inner = build()
    outer = nn.Module()
    outer.model, outer.lm_head = inner, nn.Linear(16, 20, bias=False)
    vars(outer)["config"] = SimpleNamespace(
        base_model_tp_plan={"layers.*.attention.q": "colwise", "layers.*.first": "replicated_with_grad_allreduce"}
    )
    vars(outer)["base_model_prefix"], vars(outer)["_tp_plan"] = "model", {"lm_head": "colwise_gather_output"}
    assert carried(outer)["model.layers.*.attention.q"] == "colwise"
    found = resolve(outer, None, 2)
    assert found["lm_head"] == "colwise_rep"
    assert found["model.layers.0.first"] == "summed"


def test_an_embedding_tied_to_the_head_is_split_with_it() -> None:
    """It is looked up by rows of the vocabulary, as the head computes them."""
    plan = {name: word for name, word in PLAN.items() if name != "embed"}
    assert resolve(build(), plan, 2)["embed"] == "rowwise"


def test_a_stage_has_a_part_of_the_plan() -> None:
    """What the other stages have is not missed."""
    assert set(resolve(build(), {"head": "colwise", "tail": "colwise"}, 2, whole=False)) == {"head", "embed"}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "tp needs a plan"),
        ({}, "tp needs a plan"),
        (
            {"layer.*.attention.q": "colwise"},
            r"Found: layer\.\*\.attention\.q\. Do: nearest are layers\.\*\.attention\.q",
        ),
        ({"head": "column"}, f"'column'. Do: choose one of {WORDS[0]}"),
        ({"head": 3}, "word for head is not known"),
        ({"layers.*.first": "colwise"}, "layers.0.first: LayerNorm"),
        ({"layers.*.drop": "rowwise"}, "layers.0.drop: Dropout"),
        ({"layers.*.up": "colwise", "layers.0.up": "rowwise"}, "mean one module, differently"),
        ({"layers.(0.up": "colwise"}, "no regular expression"),
    ],
)
def test_what_a_plan_cannot_mean_is_refused(plan: dict[str, Any] | None, words: str) -> None:
    """Each with what there is instead."""
    with pytest.raises(ConfigError, match=words):
        resolve(build(Dropping), plan, 2)


@pytest.mark.parametrize(
    ("parts", "heads", "plan", "words"),
    [
        (4, 2, {"layers.*.attention.q": "colwise"}, "tp=4 does not divide.*layers.0.attention.q with 2 heads"),
        (3, 4, {"layers.*.attention.o": "rowwise"}, "layers.0.attention.o with in_features 16"),
        (8, 8, {"head": "colwise_rep"}, "head with out_features 20, embed with rows 20"),
        (5, 4, {"embed": "colwise"}, "embed with embedding_dim 16"),
    ],
)
def test_sizes_that_do_not_divide_are_named(parts: int, heads: int, plan: dict[str, str], words: str) -> None:
    """Features, heads and the vocabulary."""
    with pytest.raises(LayoutError, match=words):
        resolve(build(heads=heads), plan, parts)


def test_a_head_size_counts_the_heads() -> None:
    """Grouped attention has fewer heads for keys than its attribute says for queries."""
    model = build()
    attention = model.get_submodule("layers.0.attention")
    vars(attention)["head_dim"], attention.k = 8, nn.Linear(16, 8)
    with pytest.raises(LayoutError, match="k with 1 heads"):
        resolve(model, {"layers.0.attention.k": "colwise"}, 2)


def test_the_longer_plan_is_whole() -> None:
    """Sequence parallel, with the norms."""
    assert resolve(build(), SEQUENCE, 2)["layers.1.second"] == "sequence"
