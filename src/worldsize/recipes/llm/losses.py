"""Room: the cross entropy of a language model's head, without ever holding all logits. Knows a weight, no model.

Rows of hidden states go through the head a few thousand at a time. Where a backward pass will follow, the gradients are
computed in the same pass (Hsu et al., "Liger Kernel", 2024): both products need a logit's slope while the logit is there.
They hold if all losses are weighted alike, which is so for a mean over tokens; for other weights the rows are computed anew.

Where ranks hold parts of the vocabulary (Shoeybi et al., "Megatron-LM", 2019), each computes its part of the logits; the ranks
exchange three numbers a position: the largest, the sum of exponentials, the label's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

IGNORED = -100
"""The label of a position whose loss does not count."""
ROWS = 2048
"""Of hidden states that go through the head at a time."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of the vocabulary this rank holds.

    Attributes:
        first: its first token.
        group: the ranks that hold the others.
    """

    first: int
    group: dist.ProcessGroup

    def most(self, values: Tensor) -> Tensor:
        """The largest over ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Summed over ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, cut: Cut | None = None) -> Tensor:
    """Losses by way of all logits.

    Args:
        hidden: (samples, length, size).
        weight: of the head, (vocabulary, size), or this rank's part of it. Then the gradient of `hidden` is a part of a sum.
        labels: (samples, length), the token that follows each position, or `IGNORED`.
        scale: by which logits are multiplied.
        cut: which part; None where it is whole. Collective where it is not.

    Returns:
        one loss a position (samples, length), float32 or more exact; 0 where the label is ignored.
    """
    if cut is not None:
        return chunked(hidden, weight, labels, scale, rows=labels.numel(), cut=cut)
    logits = functional.linear(hidden, weight)
    return of_logits(logits * scale if scale != 1.0 else logits, labels)


def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses (samples, length) of logits (samples, length, vocabulary), computed in float32 at least."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    flat = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(labels.shape)


def chunked(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, *, rows: int | None = None, cut: Cut | None = None,
    compiled: bool = False,
) -> Tensor:  # fmt: skip
    """The same losses as `plain`, holding the logits of `rows` positions at a time.

    `compiled`: what happens to logits is compiled: a few passes over them in place of nine, and none is written in float32,
    so that twice the rows take no more memory; each piece is a pass over the weight's gradient.
    """
    rows = rows or (2 * ROWS if compiled else ROWS)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(low), weight.to(low)
    if not torch.is_grad_enabled():
        return _pass(hidden, weight, labels, _How(scale, rows, cut, compiled), outer=None, wanted=(False, False))[0]
    found: Tensor = _Chunked.apply(hidden, weight, labels, _How(scale, rows, cut, compiled))  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class _How:
    scale: float
    rows: int
    cut: Cut | None
    compiled: bool

    def ends(self, logits: Tensor, picked: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logarithm of the sum of exponentials over the whole vocabulary, and the label's logit: (rows, 1) each."""
        if self.cut is None or own is None:
            found: tuple[Tensor, Tensor] = _maybe(_ends, self.compiled)(logits, picked, self.scale)
            return found
        most = self.cut.most(logits.amax(-1, keepdim=True).to(_exact(logits)) * self.scale)
        both = self.cut.sum(_maybe(_sums, self.compiled)(logits, picked, own, most, self.scale))
        return both[:, :1].log() + most, both[:, 1:]

    def slopes(self, logits: Tensor, ends: Tensor, picked: Tensor, weights: Tensor, own: Tensor | None) -> Tensor:
        """Of weighted losses by logits, in their dtype. Logits are used up where that is float32 or more exact."""
        hit = weights if own is None else weights * own
        if self.compiled:
            found: Tensor = _made(_slopes)(logits, ends, picked, weights, hit, self.scale)
            return found
        slopes = logits.to(_exact(logits))
        if self.scale != 1.0:
            slopes.mul_(self.scale)
        return slopes.sub_(ends).exp_().mul_(weights).scatter_add_(-1, picked, -hit).to(logits.dtype)


def _ends(logits: Tensor, picked: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    logits = logits.to(_exact(logits)) * scale if scale != 1.0 else logits.to(_exact(logits))
    return logits.logsumexp(-1, keepdim=True), logits.gather(-1, picked)


def _sums(logits: Tensor, picked: Tensor, own: Tensor, most: Tensor, scale: float) -> Tensor:
    """This rank's part: the sum of exponentials, and the label's logit, nought where another rank has it."""
    logits = logits.to(most.dtype) * scale if scale != 1.0 else logits.to(most.dtype)
    return torch.cat([(logits - most).exp().sum(-1, keepdim=True), logits.gather(-1, picked) * own], dim=-1)


def _slopes(  # noqa: PLR0917 - the compiler takes them as they come
    logits: Tensor, ends: Tensor, picked: Tensor, weights: Tensor, hit: Tensor, scale: float
) -> Tensor:
    exact = logits.to(ends.dtype) * scale if scale != 1.0 else logits.to(ends.dtype)
    here = torch.arange(logits.shape[-1], device=logits.device) == picked
    return ((exact - ends).exp() * weights - torch.where(here, hit, 0)).to(logits.dtype)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _maybe(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return _made(function) if compiled else function


@cache
def _made(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, how: _How) -> Tensor:
        losses, ctx.grads = _pass(hidden, weight, labels, how, outer=None, wanted=_wanted(ctx))
        ctx.save_for_backward(hidden, weight, labels)
        ctx.how = how
        return losses

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        found, ctx.grads = ctx.grads, None
        if found is not None and not any(outer.stride()):  # one number, spread: a sum's
            one = outer.as_strided((), ())
            return *(grad if grad is None else grad.mul_(one) for grad in found), None, None
        _, again = _pass(hidden, weight, labels, ctx.how, outer=outer, wanted=_wanted(ctx))
        return *again, None, None


def _wanted(ctx: Any) -> tuple[bool, bool]:
    """Whether the hidden states' and the weight's gradients are wanted."""
    states, weight = ctx.needs_input_grad[:2]
    return states, weight


def _pass(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    how: _How,
    *,
    outer: Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Losses, and gradients of hidden states and weight where they are wanted."""
    states, targets = hidden.flatten(0, -2), labels.flatten()
    exact = _exact(hidden)
    losses = torch.empty(
        labels.shape, dtype=exact, device=hidden.device
    )  # no view leaves this room: FSDP warns of them
    by_row = losses.view(-1)
    of_states = torch.empty_like(states) if wanted[0] else None
    of_weight = torch.zeros_like(weight) if wanted[1] else None
    for part in _parts(len(targets), how.rows):
        counted, logits = targets[part] != IGNORED, states[part] @ weight.T
        picked, own = _picked(targets[part], len(weight), how.cut)
        ends, chosen = how.ends(logits, picked, own)
        by_row[part] = (ends - chosen)[:, 0].where(counted, 0)
        if of_states is None and of_weight is None:
            continue
        weights = counted[:, None].to(exact) * how.scale
        if outer is not None:
            weights = weights * outer.flatten()[part][:, None]
        low = how.slopes(logits, ends, picked, weights, own)
        if of_states is not None:
            torch.mm(low, weight, out=of_states[part])
        if of_weight is not None:
            of_weight.addmm_(low.T, states[part])
    return losses, (None if of_states is None else of_states.view(hidden.shape), of_weight)


def _picked(targets: Tensor, size: int, cut: Cut | None) -> tuple[Tensor, Tensor | None]:
    """Where each label stands in this rank's part, (rows, 1), and whether it does; None where all do."""
    if cut is None:
        return targets.clamp_min(0)[:, None], None
    places = (targets - cut.first)[:, None]
    own = (places >= 0) & (places < size)
    return places.clamp(0, size - 1), own


def _parts(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
