"""Room: a frozen gated MLP (SwiGLU) with adapters beside its three projections, in eight bits.

    gate = states · gateᵀ + adapter, up = states · upᵀ + adapter, outputs = (silu(gate) * up) · downᵀ + adapter

What stands between the products is made where it is read: neither gate and up with what their adapters add are written down,
nor the same of the gradient that comes back through the down projection. Of these two passes over the widest tensors the
largest value is a by-product, by which the next product rounds; on CUDA they are kernels of their own
(`kernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from worldsize.recipes.llm.checked import Checked, alike
from worldsize.recipes.llm.frozen import BACKWARD, FORWARD, Rounded, computed_in, product_of_eight, rounded

if TYPE_CHECKING:
    from torch import Tensor

Factors = tuple["Tensor", "Tensor"]
"""Of an adapter: (rank, inputs), and (outputs, rank) times what its part is multiplied by."""


def mlp(states: Tensor, wide: Rounded, narrow: Rounded, *adapters: Factors) -> Tensor:
    """The network.

    Args:
        states: (..., size).
        wide: (2 * inner, size): gate and, below it, up.
        narrow: (size, inner).
        adapters: of gate, up and down, of one rank.

    Returns:
        (..., size), in what autocast says, or the states' dtype.
    """
    dtype = computed_in(states)
    (gate_down, gate_up), (up_down, up_up), (down_down, down_up) = (
        [factor.to(dtype) for factor in pair] for pair in adapters
    )
    found: Tensor = _Gated.apply(  # type: ignore[no-untyped-call]
        states.to(dtype).flatten(0, -2),
        torch.cat([gate_down, up_down]),
        gate_up,
        up_up,
        down_down,
        down_up,
        *wide,
        *narrow,
    )
    return found.view(states.shape)


class _Gated(torch.autograd.Function):
    """Of a matrix of states. What comes out of the first product is kept; what the second begins with is made again."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch gives them by position
        ctx: Any, states: Tensor, downs: Tensor, gate_up: Tensor, up_up: Tensor, down_down: Tensor, down_up: Tensor,
        wide: Tensor, wide_factor: Tensor, narrow: Tensor, narrow_factor: Tensor,
    ) -> Tensor:  # fmt: skip
        low = states @ downs.t()
        raw = product_of_eight(rounded(states), Rounded(wide.t(), wide_factor), states.dtype)
        inner, largest = _opened(raw, low, gate_up, up_up)
        low_inner = inner @ down_down.t()
        ctx.save_for_backward(
            states,
            downs,
            gate_up,
            up_up,
            down_down,
            down_up,
            wide,
            wide_factor,
            narrow,
            narrow_factor,
            low,
            raw,
            low_inner,
        )
        held = rounded(inner, FORWARD, largest)
        return product_of_eight(held, Rounded(narrow.t(), narrow_factor), states.dtype, (low_inner, down_up.t()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (states, downs, gate_up, up_up, down_down, down_up, wide, wide_factor, narrow, narrow_factor, low, raw,
         low_inner) = ctx.saved_tensors  # fmt: skip
        rank, size = gate_up.shape[1], len(gate_up)
        thin_inner = gradient @ down_up
        sent = product_of_eight(rounded(gradient, BACKWARD), Rounded(narrow, narrow_factor), gradient.dtype)
        slopes, inner, largest = _closed(raw, low, gate_up, up_up, sent, thin_inner, down_down)
        of_gate, of_up = slopes[:, :size], slopes[:, size:]
        thin = torch.cat([of_gate @ gate_up, of_up @ up_up], dim=-1)
        passed = None
        if ctx.needs_input_grad[0]:
            back = rounded(slopes, BACKWARD, largest)
            passed = product_of_eight(back, Rounded(wide, wide_factor), gradient.dtype, (thin, downs))
        return (
            passed, thin.t() @ states, of_gate.t() @ low[:, :rank], of_up.t() @ low[:, rank:], thin_inner.t() @ inner,
            gradient.t() @ low_inner, None, None, None, None,
        )  # fmt: skip


@torch.library.custom_op(
    "worldsize::gated", mutates_args=(),
    schema="(Tensor raw, Tensor low, Tensor gate_up, Tensor up_up) -> (Tensor, Tensor)",
)  # fmt: skip
def _opened(raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into the down projection.

    Args:
        raw: (rows, 2 * inner): what gate and up projections give, without their adapters.
        low: (rows, 2 * rank): what the adapters' first factors give.
        gate_up: (inner, rank).
        up_up: (inner, rank).

    Returns:
        (rows, inner), and its largest value: 0-dim, float32.
    """
    return _OPENED(raw, low, gate_up, up_up)


@torch.library.custom_op(
    "worldsize::gated_backward", mutates_args=(),
    schema="(Tensor raw, Tensor low, Tensor gate_up, Tensor up_up, Tensor sent, Tensor thin, Tensor down)"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def _closed(  # noqa: PLR0917 - operations take theirs by position
    raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor, sent: Tensor, thin: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back.

    Args:
        raw: see `_opened`.
        low: likewise.
        gate_up: likewise.
        up_up: likewise.
        sent: (rows, inner): the gradient of what went into the down projection, without the adapter's part.
        thin: (rows, rank), and
        down: (rank, inner): that part is their product.

    Returns:
        (rows, 2 * inner), the gradient of gate and up; (rows, inner), what went into the down projection; and the gradient's
        largest value: 0-dim, float32.
    """
    return _CLOSED(raw, low, gate_up, up_up, sent, thin, down)


def _opened_plain(raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _whole(raw, low, gate_up, up_up)
    inner = (functional.silu(gate) * up).to(raw.dtype)
    return inner, inner.abs().amax().float()


def _closed_plain(  # noqa: PLR0917 - as the operation
    raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor, sent: Tensor, thin: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = _whole(raw, low, gate_up, up_up)
    of_gate, of_up, inner = slopes_of(gate, up, sent.float() + thin.float() @ down.float())
    slopes = torch.cat([of_gate, of_up], dim=-1).to(raw.dtype)
    return slopes, inner.to(raw.dtype), slopes.abs().amax().float()


def slopes_of(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up where `slope` is that of silu(gate) * up, and that product."""
    opened = gate.sigmoid()
    passed = gate * opened
    return slope * up * (opened + passed * (1 - opened)), slope * passed, passed * up


def _whole(raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor) -> list[Tensor]:
    """Gate and up with their adapters, in float32."""
    pairs = zip(raw.chunk(2, dim=-1), low.chunk(2, dim=-1), (gate_up, up_up), strict=True)
    return [part.float() + thin.float() @ up.t().float() for part, thin, up in pairs]


def _key(raw: Tensor, _low: Tensor, gate_up: Tensor, *_: Tensor) -> tuple[int, int]:
    return alike(len(raw)), gate_up.shape[1]


def _example(drawn: torch.Generator, key: tuple[int, ...]) -> tuple[Tensor, ...]:
    (rows, rank), inner = key, 208
    shapes = (
        (rows, 2 * inner),
        (rows, 2 * rank),
        (inner, rank),
        (inner, rank),
        (rows, inner),
        (rows, rank),
        (rank, inner),
    )
    return tuple(torch.randn(shape, generator=drawn, device=drawn.device, dtype=torch.bfloat16) for shape in shapes)


_OPENED = Checked("opened", _opened_plain, _key, lambda drawn, key: _example(drawn, key)[:4])
_CLOSED = Checked("closed", _closed_plain, _key, _example)


@_opened.register_fake
def _(raw: Tensor, _low: Tensor, gate_up: Tensor, _up_up: Tensor) -> tuple[Tensor, Tensor]:
    return raw.new_empty(len(raw), len(gate_up)), raw.new_empty((), dtype=torch.float32)


@_closed.register_fake
def _(raw: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(raw), raw.new_empty(len(raw), raw.shape[1] // 2), raw.new_empty((), dtype=torch.float32)
