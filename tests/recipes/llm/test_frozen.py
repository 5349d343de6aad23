"""A frozen projection and its adapter as one product: what it gives, in which precision, compiled or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear, silu

from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_fp8 import fitted
from worldsize.errors import ConfigError
from worldsize.recipes.llm import fp8, frozen, joined, shape
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.lora import Adapted, Lora, adapt
from worldsize.recipes.llm.model import Decoder, Layer, Linear

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LORA = Lora(4, 8.0, 0.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def operands(dtype: torch.dtype, rows: int = 10, sizes: tuple[int, int] = (32, 48)) -> tuple[Tensor, ...]:
    """States, weight, and the two factors of an adapter."""
    drawn = torch.Generator().manual_seed(0)
    inputs, outputs = sizes
    shapes = ((2, rows, inputs), (outputs, inputs), (4, inputs), (outputs, 4))
    states, weight, down, up = (torch.randn(each, generator=drawn, dtype=torch.float64).to(dtype) for each in shapes)
    return states.requires_grad_(), weight, down.requires_grad_(), up.requires_grad_()


def plain(states: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The same as a sum."""
    return linear(states, weight) + linear(linear(states, down), up)


def gradients(found: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Of a sum with other weights for each output."""
    slopes = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    return torch.autograd.grad(found, of, slopes)


def off(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over that of what is wanted."""
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@given(rows=st.integers(1, 5), inputs=st.integers(1, 9), outputs=st.integers(1, 9))
def test_it_is_the_sum_for_any_sizes(rows: int, inputs: int, outputs: int) -> None:
    """With all gradients."""
    states, weight, down, up = operands(torch.float64, rows, (inputs, outputs))
    found, wanted = frozen.product(states, weight, down, up), plain(states, weight, down, up)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(found, states, down, up), gradients(wanted, states, down, up), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_says_in_what_it_is_computed() -> None:
    """As of linear; gradients of adapters come in their own precision."""
    states, weight, down, up = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = frozen.product(states, weight, down, up)
        assert found.dtype == plain(states, weight, down, up).dtype == torch.bfloat16
    assert {value.dtype for value in gradients(found, states, down, up)} == {torch.float32}


@pytest.mark.parametrize("kind", [frozen.FORWARD, frozen.BACKWARD])
@given(scale=st.floats(1e-6, 1e6))
def test_rounding_is_as_fine_as_the_format_for_any_scale(kind: torch.dtype, scale: float) -> None:
    """Half of its epsilon, of each value that is not tiny beside the largest."""
    value = torch.linspace(0.1, 1.0, 99) * scale
    made = frozen.rounded(value, kind)
    torch.testing.assert_close(made.values.float() * made.factor, value, rtol=torch.finfo(kind).eps / 2, atol=0)


def test_a_tensor_of_zeros_is_one_in_eight_bits() -> None:
    """Not of numbers that are none."""
    made = frozen.rounded(torch.zeros(16, 16))
    assert not made.values.float().any()
    assert made.factor > 0


def test_eight_bits_are_near_sixteen() -> None:
    """Three bits of mantissa forward and two backward; adapters' gradients are computed as ever."""
    states, weight, down, up = operands(torch.bfloat16, 32, (64, 96))
    wanted = frozen.product(states, weight, down, up)
    found = frozen.product(states, frozen.rounded(weight), down, up)
    assert 0 < off(found, wanted) < 0.04
    (passed, *own), (before, *others) = gradients(found, states, down, up), gradients(wanted, states, down, up)
    assert 0 < off(passed, before) < 0.08
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, others, strict=True))


def test_a_gradient_may_lie_as_it_likes() -> None:
    """By columns, or one number for all."""
    states, weight, down, up = operands(torch.bfloat16, 32, (64, 96))
    found = frozen.product(states, frozen.rounded(weight), down, up)
    slopes = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    wanted = torch.autograd.grad(found, states, slopes, retain_graph=True)
    across = slopes.transpose(0, 2).contiguous().transpose(0, 2)
    assert across.stride() != slopes.stride()
    torch.testing.assert_close(torch.autograd.grad(found, states, across, retain_graph=True), wanted)
    (alike,) = torch.autograd.grad(found.sum(), states)
    assert alike.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("eight", [False, True])
def test_compiled_it_is_the_same(eight: bool) -> None:
    """In one graph with what stands before it."""
    states, weight, down, up = operands(torch.bfloat16)
    held = frozen.rounded(weight) if eight else weight

    def gated(states: Tensor) -> Tensor:
        return frozen.product(silu(states), held, down, up)

    found, wanted = torch.compile(gated, fullgraph=True)(states), gated(states)
    assert off(found, wanted) < 0.01
    assert off(gradients(found, states)[0], gradients(wanted, states)[0]) < 0.03


def adapted(sizes: tuple[int, int], *, bias: bool = False) -> Adapted:
    """A frozen projection with an adapter that has learnt something."""
    made = Adapted(Linear(*sizes, bias=bias, spread=0.1), LORA).to(torch.bfloat16)
    nn.init.normal_(made.lora_B, std=0.1)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made.requires_grad_(requires_grad=False)


def test_projections_of_the_same_states_are_near_those_alone() -> None:
    """Together, in eight bits, with biases; with the gradients of states and adapters."""
    torch.manual_seed(0)
    parts = [adapted((64, outputs), bias=True) for outputs in (96, 32, 32)]
    factors = [each.requires_grad_() for part in parts for each in (part.lora_A, part.lora_B)]
    made = joined.Together(*parts)
    made.renew()
    states = torch.randn(2, 10, 64, dtype=torch.bfloat16, requires_grad=True)
    found, wanted = made(states), [part(states) for part in parts]
    assert [each.shape for each in found] == [each.shape for each in wanted]
    near(torch.cat(found, -1), torch.cat(wanted, -1), states, factors)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_an_mlp_is_near_its_parts(compiled: bool) -> None:
    """The same, of all three projections and what stands between them."""
    torch.manual_seed(0)
    gate, up, down = (adapted(sizes) for sizes in ((64, 96), (64, 96), (96, 64)))
    factors = [each.requires_grad_() for part in (gate, up, down) for each in (part.lora_A, part.lora_B)]
    made = joined.Gated(gate, up, down)
    made.renew()
    states = torch.randn(2, 10, 64, dtype=torch.bfloat16, requires_grad=True)
    found = torch.compile(made.__call__, fullgraph=True)(states) if compiled else made(states)
    near(found, down(silu(gate(states)) * up(states)), states, factors)


def near(found: Tensor, wanted: Tensor, states: Tensor, factors: list[Tensor]) -> None:
    """Within what rounding to eight bits does, one gradient after another."""
    assert 0 < off(found, wanted) < 0.08
    pairs = zip(gradients(found, states, *factors), gradients(wanted, states, *factors), strict=True)
    assert all(off(mine, theirs) < 0.12 for mine, theirs in pairs)


def test_copies_in_eight_bits_are_made_anew_where_weights_have_changed() -> None:
    """In their old place, which what is compiled knows."""
    parts = [adapted((32, 16)) for _ in range(2)]
    held = joined.InEight(*parts)
    held.renew()
    before, place = held.whole.values.clone(), held.whole.values.data_ptr()
    held.renew()
    assert torch.equal(held.whole.values.float(), before.float())
    parts[1].weight.mul_(-1)
    held.renew()
    assert held.whole.values.data_ptr() == place
    assert torch.equal(held.whole.values[16:].float(), -before[16:].float())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sizes are multiples of 16."""
    place = tmp_path_factory.mktemp("llama")
    folders.folder(place, num_hidden_layers=2, num_key_value_heads=4)
    return place


def trained(run_dir: Path, folder: Path, strategy: str, steps: int, *, eight: bool) -> list[float]:
    """Adapters of a model with its own fresh weights, up to a step; the losses."""
    found, model = fitted(
        run_dir, lambda: adapt(Decoder(shape.read(folder)), LORA), fp8.FrozenEight() if eight else None,
        strategy=strategy, steps=steps, low_frozen=True,
    )  # fmt: skip
    layers = [each for each in model.modules() if isinstance(each, Layer)]
    assert len(layers) == 2
    assert all(
        (each is not None) == eight
        for layer in layers
        for each in (layer.self_attn.together, layer.self_attn.o_proj.eight, layer.mlp.together)
    )
    return found


def test_adapters_learn_beside_eight_bits_as_beside_sixteen(tmp_path: Path, folder: Path) -> None:
    """On one rank and on two, and from a checkpoint on: weights that were read are rounded anew."""
    wanted = pool(1).run(trained, tmp_path / "sixteen", folder, "single", 8, eight=False)[0]
    found = pool(1).run(trained, tmp_path / "eight", folder, "single", 3, eight=True)[0]
    found += pool(2).run(trained, tmp_path / "eight", folder, "ddp", 8, eight=True)[0]
    assert wanted[-1] < 0.9 * wanted[0]
    assert found == pytest.approx(wanted, rel=0.02)
    assert found != wanted


def test_sizes_that_do_not_fit_stay_and_are_told(tmp_path: Path) -> None:
    """By name; none at all is refused."""
    folders.folder(tmp_path / "some", num_hidden_layers=1, intermediate_size=40)
    said: list[str] = []
    fp8.FrozenEight().convert(adapt(Decoder(shape.read(tmp_path / "some")), LORA), said.append)
    assert "3 of 7 projections stay in bf16" in said[0]
    folders.folder(tmp_path / "none", num_hidden_layers=1, hidden_size=40, intermediate_size=40)
    with pytest.raises(ConfigError, match="no projection has sizes that are multiples of 16"):
        fp8.FrozenEight().convert(adapt(Decoder(shape.read(tmp_path / "none")), LORA), print)


def test_where_it_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no torchao, but a GPU, and whole weights on each rank."""
    monkeypatch.setattr(fp8, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    settings = {"precision": "fp8", "lora_rank": "4"}
    device = torch.device("cuda", 0)
    assert isinstance(fp8.of(LLMConfig.of(settings), device), fp8.FrozenEight)
    with pytest.raises(ConfigError, match="compute capability"):
        fp8.of(LLMConfig.of(settings), torch.device("cpu"))
    with pytest.raises(ConfigError, match="single and ddp"):
        fp8.of(LLMConfig.of({**settings, "strategy": "fsdp"}), device)
    for name, value in (("lora_dropout", "0.1"), ("context_parallel_size", "2"), ("model_parallel_size", "2")):
        with pytest.raises(ConfigError, match=f"precision and {name} exclude each other"):
            LLMConfig.of({**settings, name: value})
    with pytest.raises(ConfigError, match="lora_rank and fp8_scaling exclude each other"):
        LLMConfig.of({**settings, "fp8_scaling": "rowwise"})
