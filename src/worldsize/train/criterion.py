"""Room: a loss as people have it, a mean by default, turned into one that weights exactly over ranks and micro-batches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from worldsize.errors import StepError
from worldsize.train.losses import separable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from worldsize.runtime.comm import Comm


class Criterion:
    """Sends the loss of a micro-batch backward with its true weight.

    Args:
        loss: `loss(output, target)`: a module with `reduction`, or a function that gives one number a sample, or one
            number, which a probe at the first step tells to be a mean or a sum over samples.
        comm: ranks agree on what the probe found.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], comm: Comm) -> None:
        self._loss, self._comm = loss, comm
        self._each = _elementwise(loss)
        self._kind: str | None = "each" if self._each is not None else None

    def arguments(self, output: Any, target: Any) -> dict[str, Any]:
        """The arguments of `step.backward` for a micro-batch.

        Raises:
            StepError: the loss is neither per sample, nor a mean or a sum over samples.
        """
        if self._each is not None:
            return _from_elements(self._loss, self._each(output, target), target)
        value = self._loss(output, target)
        if self._kind is None:
            self._kind = self._comm.broadcast(self._find(value, output, target))
        if self._kind == "each":
            return {"losses": _per_sample(value, len(target))}
        if self._kind == "mean":
            return {"losses": value, "mean_over": len(target)}
        return {"share": value}

    def scores(self, output: Any, target: Any) -> tuple[float, float]:
        """Sum and count for an evaluation."""
        said = self.arguments(output, target)
        if "share" in said:
            return float(said["share"]), 1.0
        losses = said["losses"].detach().double()
        if "mean_over" in said:
            return float(losses) * said["mean_over"], float(said["mean_over"])
        return float(losses.sum()), float(said.get("sum_over", losses.numel()))

    def _find(self, value: Tensor, output: Any, target: Any) -> str:
        if value.ndim and len(value) == len(target):
            return "each"
        found = separable(self._loss, output, target)
        if found == "neither":
            raise StepError(
                "this loss is neither a mean nor a sum over samples, so its weight in a step is not known",
                do="return one number a sample, or write the loop with ws.Run and say mean_over= or sum_over=",
            )
        return found


def _elementwise(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor] | None:
    """A torch loss module's own unreduced form."""
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", None) in ("mean", "none"):
        each = copy.copy(loss)
        each.reduction = "none"  # type: ignore[assignment]
        return each
    return None


def _from_elements(loss: Any, elements: Tensor, target: Any) -> dict[str, Any]:
    labels = isinstance(target, torch.Tensor) and not target.is_floating_point()
    if labels and isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return {"losses": elements.sum(), "sum_over": _label_weight(loss, target)}
    return {"losses": _per_sample(elements, len(target))}


def _label_weight(loss: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> float:
    """What torch divides by: the number of labels that are not ignored, each with its class's weight."""
    kept = target != loss.ignore_index
    if loss.weight is None:
        return float(kept.sum())
    return float(loss.weight.to(target.device)[target[kept]].sum(dtype=torch.float64))


def _per_sample(values: Tensor, samples: int) -> Tensor:
    return values.reshape(samples, -1).mean(dim=1) if values.numel() != samples else values.reshape(-1)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """For each sample the share of right classes.

    Args:
        output: (samples, classes, ...) scores.
        target: (samples, ...) class numbers.

    Returns:
        (samples,) numbers from 0 to 1.
    """
    return (output.argmax(dim=1) == target).float().reshape(len(target), -1).mean(dim=1)
