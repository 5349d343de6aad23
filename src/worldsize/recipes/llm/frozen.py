"""Room: a frozen projection and the adapter beside it as one product, forward and backward; in eight bits where asked.

    outputs = states · weightᵀ + (states · downᵀ) · upᵀ

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. What the adapter gives is added where the projection's
product already lies: a tensor of the outputs' size less to write and two less to read, in each direction. A frozen weight
is rounded to eight bits once; states and gradients are each time, by one factor for all of a tensor (Micikevicius et al.,
"FP8 Formats for Deep Learning", 2022): e4m3 forward, e5m2 backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12
"""Of a tensor of zeros nothing is divided by zero."""


class Rounded(NamedTuple):
    """A tensor in eight bits.

    Attributes:
        values: (rows, columns), of eight bits.
        factor: 0-dim, float32: by which they are multiplied to be the tensor's.
    """

    values: Tensor
    factor: Tensor


def rounded(value: Tensor, kind: torch.dtype = FORWARD, largest: Tensor | None = None) -> Rounded:
    """Its largest value becomes the format's largest. `largest`: that value, where it is known."""
    factor = factor_for(value.abs().amax() if largest is None else largest, kind)
    return Rounded(divided(value, factor, kind), factor)


def factor_for(largest: Tensor, kind: torch.dtype) -> Tensor:
    """By which a tensor is divided, so that its largest value becomes the format's: 0-dim, float32."""
    return largest.float().clamp(min=LEAST) / torch.finfo(kind).max


def divided(value: Tensor, factor: Tensor, kind: torch.dtype) -> Tensor:
    """In eight bits; what is larger than the format's largest becomes that."""
    most = torch.finfo(kind).max
    return (value.float() / factor).clamp(-most, most).to(kind)


def computed_in(states: Tensor) -> torch.dtype:
    """What autocast says, or the states' own."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def product(states: Tensor, weight: Tensor | Rounded, down: Tensor, up: Tensor) -> Tensor:
    """A frozen projection with its adapter.

    Args:
        states: (..., inputs).
        weight: (outputs, inputs), frozen; or the same in eight bits.
        down: (rank, inputs), trained.
        up: (outputs, rank), trained, times what the adapter's part is multiplied by.

    Returns:
        (..., outputs), in what autocast says, or the states' dtype.
    """
    dtype = computed_in(states)
    states, down, up = (value.to(dtype) for value in (states, down, up))
    held = weight if isinstance(weight, Rounded) else (weight.to(dtype), None)
    found: Tensor = _Product.apply(states.flatten(0, -2), down, up, *held)  # type: ignore[no-untyped-call]
    return found.view(*states.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Of matrices: states (rows, inputs), and a weight in eight bits where it has a factor."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch gives them by position
        ctx: Any, states: Tensor, down: Tensor, up: Tensor, weight: Tensor, factor: Tensor | None
    ) -> Tensor:
        low = states @ down.t()
        ctx.save_for_backward(states, down, up, weight, factor, low)
        if factor is None:
            found: Tensor = _sum(states, weight.t(), low, up.t())
            return found
        return product_of_eight(rounded(states), Rounded(weight.t(), factor), states.dtype, (low, up.t()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, down, up, weight, factor, low = ctx.saved_tensors
        thin, passed = gradient @ up, None
        if ctx.needs_input_grad[0] and factor is None:
            passed = _sum(gradient, weight, thin, down)
        elif ctx.needs_input_grad[0]:
            sent = rounded(gradient, BACKWARD)
            passed = product_of_eight(sent, Rounded(weight, factor), gradient.dtype, (thin, down))
        return passed, thin.t() @ states, gradient.t() @ low, None, None


def product_of_eight(
    left: Rounded, right: Rounded, dtype: torch.dtype, beside: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """A product in eight bits, with that of two thin matrices of `dtype` added to it where they are given.

    Args:
        left: (rows, inner).
        right: (inner, columns).
        dtype: of what is found.
        beside: (rows, rank), (rank, columns).
    """
    values = right.values
    # Turned here and not in the operation: a compiler writes a kernel for it that is several times as fast as the copy.
    columns = values if values.stride(0) == 1 else values.t().contiguous().t()
    found: Tensor = _sum_of_eight(left.values, columns, left.factor, right.factor, dtype, *(beside or (None, None)))
    return found


@torch.library.custom_op(
    "worldsize::sum_of_products", mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor thin, Tensor low) -> Tensor",
)  # fmt: skip
def _sum(left: Tensor, right: Tensor, thin: Tensor, low: Tensor) -> Tensor:
    """Of left · right and thin · low. One operation: a compiler would write the second product down, and then add it."""
    return torch.mm(left, right).addmm_(thin, low)


@torch.library.custom_op(
    "worldsize::sum_of_products_of_eight", mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor left_factor, Tensor right_factor, ScalarType dtype, Tensor? thin, Tensor? low)"
    " -> Tensor",
)  # fmt: skip
def _sum_of_eight(  # noqa: PLR0917 - operations take theirs by position
    left: Tensor, right: Tensor, left_factor: Tensor, right_factor: Tensor, dtype: torch.dtype,
    thin: Tensor | None, low: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same, the first product in eight bits. GPUs want the factors by rows and by columns."""
    fast = left.dtype is FORWARD
    out: Tensor = torch._scaled_mm(  # noqa: SLF001 - the public one is newer than the oldest torch that this runs on
        left.contiguous(), right, left_factor, right_factor, out_dtype=dtype, use_fast_accum=fast
    )
    return out if thin is None or low is None else out.addmm_(thin, low)


@_sum.register_fake
def _(left: Tensor, right: Tensor, thin: Tensor, _low: Tensor) -> Tensor:
    return thin.new_empty(left.shape[0], right.shape[1])


@_sum_of_eight.register_fake
def _(
    left: Tensor, right: Tensor, _left_factor: Tensor, _right_factor: Tensor, dtype: torch.dtype,
    _thin: Tensor | None, _low: Tensor | None,
) -> Tensor:  # fmt: skip
    return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
