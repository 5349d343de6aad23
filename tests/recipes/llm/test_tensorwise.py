"""Trained projections in eight bits: near what sixteen give, for any rows, compiled or not, whole or gathered."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import silu

from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_fp8 import fitted
from tests.recipes.llm.test_frozen import gradients, off
from worldsize.recipes.llm import fp8, shape, tensorwise
from worldsize.recipes.llm.gated import slopes_of
from worldsize.recipes.llm.model import Decoder, Layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

FORWARD, BACKWARD = 0.09, 0.12
"""How far eight bits may be off: three roundings to three bits, and to two, of normal numbers."""


def parts(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, ...]:
    """Query and value with their biases; gate, up and down without."""
    torch.manual_seed(0)
    sizes = (64, 32, True), (64, 16, True), (64, 96, False), (64, 96, False), (96, 64, False)
    return tuple(nn.Linear(inputs, outputs, bias=bias, dtype=dtype) for inputs, outputs, bias in sizes)


def both(made: tuple[nn.Linear, ...]) -> tuple[Callable[[Tensor], list[Tensor]], Callable[[Tensor], list[Tensor]]]:
    """All of it in eight bits, and as it is."""
    query, value, gate, up, down = made
    joint, mlp = tensorwise.Joint(query, value), tensorwise.MLP(gate, up, down)
    return (
        lambda states: [*joint(states), mlp(states)],
        lambda states: [query(states), value(states), down(silu(gate(states)) * up(states))],
    )


def compare(eight: Callable[[Tensor], list[Tensor]], plain: Callable[[Tensor], list[Tensor]], states: Tensor,
            weights: list[nn.Parameter]) -> None:  # fmt: skip
    """Outputs and all gradients."""
    found, wanted = eight(states), plain(states)
    assert [each.shape for each in found] == [each.shape for each in wanted]
    assert all(0 < off(mine, theirs) < FORWARD for mine, theirs in zip(found, wanted, strict=True))
    of_found, of_wanted = (
        gradients(torch.cat([each.flatten().to(torch.bfloat16) for each in made]), states, *weights)
        for made in (found, wanted)
    )
    assert all(off(mine, theirs) < BACKWARD for mine, theirs in zip(of_found, of_wanted, strict=True))


@settings(max_examples=25)
@given(rows=st.integers(1, 40), samples=st.integers(1, 3))
def test_they_are_near_for_any_rows(rows: int, samples: int) -> None:
    """GPUs want multiples of 16 to sum over: what is added for that is seen nowhere."""
    made = parts()
    weights = [value for part in made for value in part.parameters()]
    states = torch.randn(samples, rows, 64, dtype=torch.bfloat16, requires_grad=True)
    compare(*both(made), states, weights)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_they_are_near_too() -> None:
    """In one graph."""
    made = parts()
    eight, plain = both(made)
    states = torch.randn(2, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    weights = [value for part in made for value in part.parameters()]
    compare(torch.compile(eight, fullgraph=True), plain, states, weights)


def test_autocast_says_in_what_it_is_computed() -> None:
    """Weights in float32 get gradients in float32."""
    made = parts(torch.float32)
    states = torch.randn(2, 24, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = both(made)[0](states)
    assert {each.dtype for each in found} == {torch.bfloat16}
    sum(each.float().sum() for each in found).backward()  # type: ignore[union-attr]
    assert {value.grad.dtype for part in made for value in part.parameters() if value.grad is not None} == {
        torch.float32
    }


@pytest.mark.parametrize("off", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", range(5))
def test_what_is_no_number_is_not_hidden(where: int, off: float) -> None:
    """Whether states or a weight have it: it reaches the gradients, where a run looks for it; no clamp makes a number of it."""
    made = parts()
    states = torch.randn(2, 24, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        (states[0] if where == 0 else made[where].weight)[3, 5] = off
    states.requires_grad_()
    found = both(made)[0](states)
    of_states, *_ = gradients(torch.cat([each.flatten() for each in found]), states)
    assert not of_states.isfinite().all()


def test_a_shard_can_be_pickled() -> None:
    """As any tensor that a program saves by itself."""
    pytest.importorskip("torchao")
    from torchao.float8.float8_training_tensor import LinearMMConfig

    value = torch.randn(4, 4)
    back = pickle.loads(pickle.dumps(fp8._shard()(value, LinearMMConfig(), torch.float8_e4m3fn)))
    assert type(back) is fp8.Shard
    assert torch.equal(back._tensor, value)


def test_the_way_back_is_that_of_the_product() -> None:
    """silu(gate) * up, against torch's own gradients."""
    gate, up, slope = (torch.randn(3, 5, dtype=torch.float64, requires_grad=index < 2) for index in range(3))
    inner = silu(gate) * up
    wanted = torch.autograd.grad(inner, (gate, up), slope)
    of_gate, of_up, made = slopes_of(gate, up, slope)
    torch.testing.assert_close((of_gate, of_up, made), (*wanted, inner))


def trained(run_dir: Path, folder: Path, strategy: str, steps: int, *, eight: bool, compiled: bool) -> list[float]:
    """The losses; in eight bits as a GPU computes them, not emulated."""
    made = fp8.Eight("tensorwise", gathered=strategy == "fsdp") if eight else None
    losses, model = fitted(
        run_dir, lambda: Decoder(shape.read(folder)), made, strategy=strategy, steps=steps, compile=compiled
    )
    layers = [each for each in model.modules() if isinstance(each, Layer)]
    assert all(
        (held is not None) == eight for layer in layers for held in (layer.self_attn.together, layer.mlp.together)
    )
    return losses


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_learns_as_in_sixteen(tmp_path: Path, compiled: bool) -> None:
    """Whole on one rank, then sharded over two and gathered in eight bits, from the other's checkpoint."""
    pytest.importorskip("torchao")
    folders.folder(tmp_path / "model", num_hidden_layers=2, num_key_value_heads=4)
    run = pool(1).run
    wanted = run(trained, tmp_path / "sixteen", tmp_path / "model", "single", 8, eight=False, compiled=False)[0]
    found = run(trained, tmp_path / "eight", tmp_path / "model", "single", 4, eight=True, compiled=compiled)[0]
    found += pool(2).run(trained, tmp_path / "eight", tmp_path / "model", "fsdp", 8, eight=True, compiled=compiled)[0]
    assert wanted[-1] < 0.5 * wanted[0]
    assert found == pytest.approx(wanted, rel=0.1)
    assert found != wanted
