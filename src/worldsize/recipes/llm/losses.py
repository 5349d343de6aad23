"""Room: the cross entropy of a language model's head, without ever holding all logits. Knows a weight, no model.

Rows of hidden states go through the head a few thousand at a time. Where a backward pass will follow, the gradients are
computed in the same pass (Hsu et al., "Liger Kernel", 2024): both products need a logit's slope while the logit is there.
They hold if all losses are weighted alike, which is so for a mean over tokens; for other weights the rows are computed anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

IGNORED = -100
"""The label of a position whose loss does not count."""
ROWS = 2048
"""Of hidden states that go through the head at a time."""


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """Losses by way of all logits.

    Args:
        hidden: (samples, length, size).
        weight: of the head, (vocabulary, size).
        labels: (samples, length), the token that follows each position, or `IGNORED`.
        scale: by which logits are multiplied.

    Returns:
        one loss a position (samples, length), float32 or more exact; 0 where the label is ignored.
    """
    logits = functional.linear(hidden, weight)
    return of_logits(logits * scale if scale != 1.0 else logits, labels)


def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses (samples, length) of logits (samples, length, vocabulary), computed in float32 at least."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    flat = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(labels.shape)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, rows: int = ROWS) -> Tensor:
    """The same losses as `plain`, holding the logits of `rows` positions at a time."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
    if not torch.is_grad_enabled():
        return _pass(hidden, weight, labels, scale=scale, rows=rows, outer=None, wanted=(False, False))[0]
    found: Tensor = _Chunked.apply(hidden, weight, labels, scale, rows)  # type: ignore[no-untyped-call]
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no names
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, rows: int
    ) -> Tensor:
        losses, ctx.grads = _pass(hidden, weight, labels, scale=scale, rows=rows, outer=None, wanted=_wanted(ctx))
        ctx.save_for_backward(hidden, weight, labels)
        ctx.scale, ctx.rows = scale, rows
        return losses

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        found, ctx.grads = ctx.grads, None
        if found is not None and not any(outer.stride()):  # one number, spread: a sum's
            one = outer.as_strided((), ())
            return *(grad if grad is None else grad.mul_(one) for grad in found), None, None, None
        _, again = _pass(hidden, weight, labels, scale=ctx.scale, rows=ctx.rows, outer=outer, wanted=_wanted(ctx))
        return *again, None, None, None


def _wanted(ctx: Any) -> tuple[bool, bool]:
    """Whether the hidden states' and the weight's gradients are wanted."""
    states, weight = ctx.needs_input_grad[:2]
    return states, weight


def _pass(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float,
    rows: int,
    outer: Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Losses, and gradients of hidden states and weight where they are wanted."""
    states, targets = hidden.flatten(0, -2), labels.flatten()
    exact = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    losses = torch.empty(targets.shape, dtype=exact, device=hidden.device)
    of_states = torch.empty_like(states) if wanted[0] else None
    of_weight = torch.zeros_like(weight) if wanted[1] else None
    for part in _parts(len(targets), rows):
        counted, logits = targets[part] != IGNORED, (states[part] @ weight.T).to(exact)
        picked = targets[part].clamp_min(0)[:, None]
        if scale != 1.0:
            logits.mul_(scale)
        ends = logits.logsumexp(-1, keepdim=True)
        losses[part] = ((ends - logits.gather(-1, picked))[:, 0]).where(counted, 0)
        if of_states is None and of_weight is None:
            continue
        weights = counted[:, None].to(exact) * scale
        if outer is not None:
            weights = weights * outer.flatten()[part][:, None]
        slopes = logits.sub_(ends).exp_().mul_(weights)
        slopes.scatter_add_(-1, picked, -weights)
        low = slopes.to(hidden.dtype)
        if of_states is not None:
            torch.mm(low, weight, out=of_states[part])
        if of_weight is not None:
            of_weight.addmm_(low.T, states[part])
    return losses.view(labels.shape), (None if of_states is None else of_states.view(hidden.shape), of_weight)


def _parts(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
