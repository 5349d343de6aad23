"""Room: what a loss means. A number counts only with how many items it is over; everything else is refused in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contribution:
    """One micro-batch's part of the step's loss.

    Attributes:
        losses: what to send backward, one number or many, still to be divided by the step's count unless `divided`.
        explicit: how many items it is over, where that was said at the call and not counted beforehand.
        divided: the user already divided by `step.totals`.
    """

    losses: Tensor
    explicit: float | None = None
    divided: bool = False


def read(
    losses: Tensor | None, mean_over: float | None, sum_over: float | None, share: Tensor | None, count: float
) -> Contribution:
    """Understand the arguments of `step.backward`.

    Raises:
        StepError: a bare scalar, a wrong number of losses, or contradicting arguments, each with what to write.
    """
    if share is not None:
        if losses is not None or mean_over is not None or sum_over is not None:
            raise StepError("share= stands alone: it is a loss already divided by step.totals")
        return Contribution(share, divided=True)
    if losses is None or (mean_over is not None and sum_over is not None):
        raise StepError("backward takes losses, or one number with either mean_over= or sum_over=")
    if mean_over is not None or sum_over is not None:
        return _number(losses, mean_over, sum_over)
    if losses.numel() != count:
        raise _mismatch(losses, count)
    if losses.ndim == 0:
        raise _bare()
    return Contribution(losses)


def _number(loss: Tensor, mean_over: float | None, sum_over: float | None) -> Contribution:
    if loss.numel() != 1:
        raise StepError("mean_over= and sum_over= go with one number", found=f"a tensor of shape {tuple(loss.shape)}")
    if mean_over == 0:
        raise StepError(
            "a mean over no items is NaN, and so is its gradient",
            do="pass a sum with sum_over=, or losses[mask] with reduction='none': both are 0 over nothing",
        )
    if mean_over is not None:
        return Contribution(loss.reshape(()) * mean_over, explicit=float(mean_over))
    assert sum_over is not None
    return Contribution(loss.reshape(()), explicit=float(sum_over))


def _bare() -> StepError:
    return StepError(
        "got one number: a mean or a sum, over how many?", do="pass reduction='none', or mean_over= / sum_over="
    )


def _mismatch(losses: Tensor, count: float) -> StepError:
    if losses.ndim == 0:
        return _bare()
    return StepError(
        f"{losses.numel():,} losses for {count:,.0f} counted items",
        found=f"a tensor of shape {tuple(losses.shape)}",
        do="mask the padding (losses[mask]), or fix count= of run.steps",
    )


def separable(loss: Callable[[Any, Any], Tensor], output: Any, target: Any) -> str:
    """Find out what a scalar loss is, from the loss of all samples against the losses of two unequal parts.

    Args:
        loss: gives a 0-dim tensor.
        output: the model's output, first dimension samples, at least 3 of them.
        target: what it is compared with, first dimension samples.

    Returns:
        "mean", "sum", or "neither" (for example a mean weighted by class, or a contrastive loss).
    """
    size = len(target)
    cut = max(1, size // 3)
    with torch.no_grad():
        whole = float(loss(output, target))
        first, second = float(loss(output[:cut], target[:cut])), float(loss(output[cut:], target[cut:]))
    weighted = {"mean": (first * cut + second * (size - cut)) / size, "sum": first + second}
    fits = [name for name, value in weighted.items() if abs(value - whole) <= 1e-4 * max(abs(whole), 1e-8)]
    return fits[0] if len(fits) == 1 else "neither"


def counted(count: Mapping[str, float], samples: int, of: str | None) -> float:
    """How many items this micro-batch's losses are over.

    Args:
        count: what `count=` gave for the micro-batch, by name; empty where samples are counted.
        samples: samples in the micro-batch.
        of: which name is meant; needed where there are several.

    Raises:
        StepError: the name is not counted, or several are and none was named.
    """
    if of == "samples" or (of is None and not count):
        return samples
    if of is None and len(count) == 1:
        return next(iter(count.values()))
    if of is not None and of in count:
        return count[of]
    raise StepError(
        "which count are these losses over?", found=f"of={of!r}", do=f"of= one of {sorted(count)} or 'samples'"
    )
