"""Room: trained projections in eight bits, one factor a tensor: those of the same states as one, and the gated MLP.

As torchao's tensorwise ones (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): e4m3 forward, e5m2 for gradients,
factors found anew for each product. What is different is how often tensors are read and written. GPUs multiply eight bits row
by row, so that each gradient and all that a weight's gradient is made of is wanted by rows and by columns. Both are written at
once here, states that several projections share are turned once for all of them, and an MLP's activation is written in eight
bits only, not rounded to sixteen before; the gradients of gate and up have one factor. On CUDA these passes are kernels of
their own (`kernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from worldsize.recipes.llm.checked import Checked, alike
from worldsize.recipes.llm.frozen import BACKWARD, FORWARD, Rounded, computed_in, divided, factor_for, rounded
from worldsize.recipes.llm.gated import slopes_of

if TYPE_CHECKING:
    from torch import Tensor, nn


MULTIPLE = 16
"""Of which the sizes of a product in eight bits must be multiples."""


class Joint:
    """Projections of the same states.

    Args:
        parts: with a weight of eight bits, as FSDP gathers it, or one that is rounded at each use.
    """

    def __init__(self, *parts: nn.Linear) -> None:
        self._parts = parts

    def __call__(self, states: Tensor) -> list[Tensor]:
        """(..., inputs) -> (..., outputs) of each."""
        flat = _flat(states)
        found = _Joint.apply(flat, *(part.weight for part in self._parts))  # type: ignore[no-untyped-call]
        outputs = [_as(each, states) for each in found]
        return [
            each if part.bias is None else each + part.bias.to(each.dtype)
            for part, each in zip(self._parts, outputs, strict=True)
        ]


class MLP:
    """A gated MLP without biases.

    Args:
        gate, up, down: see `Joint`.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self._parts = gate, up, down

    def __call__(self, states: Tensor) -> Tensor:
        """(..., size) -> the same."""
        found = _MLP.apply(_flat(states), *(part.weight for part in self._parts))  # type: ignore[no-untyped-call]
        return _as(found, states)


@torch._dynamo.allow_in_graph  # noqa: SLF001 - as torchao's own: what is within a weight is no tensor to dynamo
class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        held = rounded(states)
        ctx.save_for_backward(*held, *weights)
        return tuple(_forward(held, weight, states.dtype) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, factor, *weights = ctx.saved_tensors
        states = Rounded(_turned(values).t(), factor)
        passed, of_weights = [], []
        for gradient, weight in zip(gradients, weights, strict=True):
            sent, by_columns = _both_ways(gradient)
            passed.append(_back(sent, weight, gradient.dtype))
            of_weights.append(_product(by_columns, states, gradient.dtype))
        return sum(passed[1:], passed[0]), *of_weights


@torch._dynamo.allow_in_graph  # noqa: SLF001 - likewise
class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        held = rounded(states)
        opened = [_forward(held, weight, states.dtype) for weight in (gate, up)]
        inner_factor = _inner_factor(*opened)
        inner = Rounded(_opened(*opened, inner_factor), inner_factor)
        ctx.save_for_backward(*held, *opened, inner_factor, gate, up, down)
        return _forward(inner, down, states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        values, factor, opened_gate, opened_up, inner_factor, gate, up, down = ctx.saved_tensors
        dtype = gradient.dtype
        sent, by_columns = _both_ways(gradient)
        *plain, gate_turned, up_turned, inner_turned, slope = _closed(
            opened_gate, opened_up, _back(sent, down, dtype), inner_factor
        )
        of_down = _product(by_columns, Rounded(inner_turned.t(), inner_factor), dtype)
        states = Rounded(_turned(values).t(), factor)
        of_gate, of_up = (_product(Rounded(each, slope), states, dtype) for each in (gate_turned, up_turned))
        of_states = [
            _back(Rounded(each, slope), weight, dtype) for each, weight in zip(plain, (gate, up), strict=True)
        ]
        return of_states[0] + of_states[1], of_gate, of_up, of_down


def scaled(value: Tensor, scale: Tensor) -> Tensor:
    """Times scale, in eight bits (e4m3), in one pass."""
    return _SCALED(value.contiguous(), scale)


def _flat(states: Tensor) -> Tensor:
    """(..., size) -> (rows, size), in what autocast says; so many rows that they can be summed over in eight bits."""
    flat = states.flatten(0, -2).to(computed_in(states))
    return functional.pad(flat, (0, 0, 0, -len(flat) % MULTIPLE)) if len(flat) % MULTIPLE else flat


def _as(found: Tensor, states: Tensor) -> Tensor:
    """(rows, outputs) -> (..., outputs) of those states."""
    return found[: states.shape[:-1].numel()].view(*states.shape[:-1], -1)


def _forward(states: Rounded, weight: Tensor, dtype: torch.dtype) -> Tensor:
    held = _eight(weight)
    return _product(states, Rounded(held.values.t(), held.factor), dtype, fast=True)


def _back(gradient: Rounded, weight: Tensor, dtype: torch.dtype) -> Tensor:
    held = _eight(weight)
    return _product(gradient, Rounded(_turned(held.values).t(), held.factor), dtype)


def _eight(weight: Tensor) -> Rounded:
    """As it was gathered (torchao's), or rounded now."""
    data, scale = getattr(weight, "_data", None), getattr(weight, "_scale", None)
    if data is None or scale is None:
        return rounded(weight.detach())
    return Rounded(data, scale.reciprocal())


def _product(left: Rounded, right: Rounded, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """The left one by rows, the right one by columns. `fast`: sums of products in less than float32."""
    found: Tensor = torch._scaled_mm(  # noqa: SLF001 - the public one is newer than the oldest torch that this runs on
        left.values, right.values, left.factor, right.factor, out_dtype=dtype, use_fast_accum=fast
    )
    return found


def _both_ways(gradient: Tensor) -> tuple[Rounded, Rounded]:
    """In eight bits, and the same turned."""
    gradient = gradient.contiguous()
    factor = factor_for(gradient.abs().amax(), BACKWARD)
    values, turned = _rounded_both(gradient, factor)
    return Rounded(values, factor), Rounded(turned, factor)


@torch.library.custom_op("worldsize::turned", mutates_args=(), schema="(Tensor values) -> Tensor")
def _turned(values: Tensor) -> Tensor:
    """(rows, columns) of eight bits -> (columns, rows)."""
    return _TURNED(values.contiguous())


@torch.library.custom_op(
    "worldsize::rounded_both", mutates_args=(), schema="(Tensor gradient, Tensor factor) -> (Tensor, Tensor)"
)
def _rounded_both(gradient: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) -> the same and (columns, rows), of eight bits."""
    return _ROUNDED_BOTH(gradient, factor)


@torch.library.custom_op("worldsize::gated_factor", mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor")
def _inner_factor(gate: Tensor, up: Tensor) -> Tensor:
    """Of silu(gate) * up in eight bits."""
    return _FACTOR(gate, up)


@torch.library.custom_op(
    "worldsize::gated_in_eight", mutates_args=(), schema="(Tensor gate, Tensor up, Tensor factor) -> Tensor"
)
def _opened(gate: Tensor, up: Tensor, factor: Tensor) -> Tensor:
    """silu(gate) * up in eight bits."""
    return _OPENED(gate, up, factor)


@torch.library.custom_op(
    "worldsize::gated_in_eight_backward", mutates_args=(),
    schema="(Tensor gate, Tensor up, Tensor slope, Tensor inner_factor)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def _closed(gate: Tensor, up: Tensor, slope: Tensor, inner_factor: Tensor) -> tuple[Tensor, ...]:
    """The way back.

    Args:
        gate: (rows, inner).
        up: likewise.
        slope: likewise, the gradient of silu(gate) * up.
        inner_factor: of that product in eight bits.

    Returns:
        in eight bits the gradients of gate and up; both turned, (inner, rows); silu(gate) * up turned; and the factor that
        both gradients have.
    """
    return _CLOSED(gate, up, slope, inner_factor)


def _factor_plain(gate: Tensor, up: Tensor) -> Tensor:
    return factor_for((functional.silu(gate.float()) * up.float()).abs().amax(), FORWARD)


def _opened_plain(gate: Tensor, up: Tensor, factor: Tensor) -> Tensor:
    return divided(functional.silu(gate.float()) * up.float(), factor, FORWARD)


def _closed_plain(gate: Tensor, up: Tensor, slope: Tensor, inner_factor: Tensor) -> tuple[Tensor, ...]:
    of_gate, of_up, inner = slopes_of(gate.float(), up.float(), slope.float())
    factor = factor_for(torch.stack([of_gate, of_up]).abs().amax(), BACKWARD)
    plain = [divided(each, factor, BACKWARD) for each in (of_gate, of_up)]
    return *plain, *(each.t().contiguous() for each in (*plain, divided(inner, inner_factor, FORWARD))), factor


def _rounded_both_plain(gradient: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    values = divided(gradient, factor, BACKWARD)
    return values, values.t().contiguous()


def _key(operand: Tensor, *_: Tensor) -> tuple[int, int]:
    return alike(operand.shape[0]), alike(operand.shape[1])


def _drawn(drawn: torch.Generator, key: tuple[int, ...], count: int, *factors: float) -> list[Tensor]:
    """So many tensors of sixteen bits, and factors: powers of two, by which nothing lies between two values of eight bits."""
    made = torch.randn(count, key[0], key[1] + 64, generator=drawn, device=drawn.device, dtype=torch.bfloat16)
    return [*made, *(torch.tensor(factor, device=drawn.device) for factor in factors)]


def _turned_plain(values: Tensor) -> Tensor:
    return values.t().contiguous()


def _scaled_plain(value: Tensor, scale: Tensor) -> Tensor:
    most = torch.finfo(FORWARD).max
    return (value.float() * scale).clamp(-most, most).to(FORWARD)


_TURNED = Checked("turned", _turned_plain, _key, lambda drawn, key: (_drawn(drawn, key, 1)[0].to(BACKWARD),))
_ROUNDED_BOTH = Checked(
    "rounded_both", _rounded_both_plain, _key, lambda drawn, key: tuple(_drawn(drawn, key, 1, 2.0**-13))
)
_FACTOR = Checked("factor_of_opened", _factor_plain, _key, lambda drawn, key: tuple(_drawn(drawn, key, 2)))
_OPENED = Checked("opened_in_eight", _opened_plain, _key, lambda drawn, key: tuple(_drawn(drawn, key, 2, 2.0**-5)))
_CLOSED = Checked("closed_in_eight", _closed_plain, _key, lambda drawn, key: tuple(_drawn(drawn, key, 3, 2.0**-5)))
_SCALED = Checked(
    "scaled", _scaled_plain, _key,
    lambda drawn, key: ((pair := _drawn(drawn, key, 1, 64.0))[0].float(), pair[1]),
)  # fmt: skip


@_turned.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape[1], values.shape[0])


@_rounded_both.register_fake
def _(gradient: Tensor, _factor: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = gradient.shape
    return gradient.new_empty(rows, columns, dtype=BACKWARD), gradient.new_empty(columns, rows, dtype=BACKWARD)


@_inner_factor.register_fake
def _(gate: Tensor, _up: Tensor) -> Tensor:
    return gate.new_empty((), dtype=torch.float32)


@_opened.register_fake
def _(gate: Tensor, _up: Tensor, _factor: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, dtype=FORWARD)


@_closed.register_fake
def _(gate: Tensor, _up: Tensor, _slope: Tensor, inner_factor: Tensor) -> tuple[Tensor, ...]:
    rows, columns = gate.shape
    plain = [gate.new_empty(rows, columns, dtype=BACKWARD) for _ in range(2)]
    turned = [gate.new_empty(columns, rows, dtype=kind) for kind in (BACKWARD, BACKWARD, FORWARD)]
    return *plain, *turned, torch.empty_like(inner_factor)
