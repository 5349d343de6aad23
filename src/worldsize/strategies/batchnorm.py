"""Room: running statistics that do not depend on who saw which micro-batch.

Each forward pass moves a statistic by `v <- (1 - m) v + m s`, which is affine in the old value. So what a rank's
micro-batches did to it is one affine map, and composing the maps in the order of the micro-batches gives what one rank
would have had. With `momentum=None` the statistic is a plain mean over all passes, which composes by its sums.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from worldsize.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from worldsize.strategies.base import Strategy


class RunningStatistics:
    """The running means and variances of one model, composed over ranks once a step.

    Args:
        model: a placed model.
        strategy: gives the small collectives.
    """

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and _tracks(layer)]
        self._before: list[Tensor] = []

    def refuse_synchronised(self, most: int, fewest: int) -> None:
        """SyncBatchNorm normalises over the micro-batches that happen to run at the same time.

        Args:
            most: how many micro-batches the busiest rank has in a step.
            fewest: how many the idlest one has, in whichever step that is.

        Raises:
            LayoutError: it is used with more than one micro-batch a rank, where no layout equals another; or a rank
                has none, and the others would wait for it, or normalise over what it runs in their place.
        """
        if not any(isinstance(layer, nn.SyncBatchNorm) for layer in self._model.modules()):
            return
        if fewest < 1:
            raise LayoutError(
                "SyncBatchNorm needs every rank in every forward pass, and the last step of an epoch leaves ranks idle",
                do="use DataLoader(drop_last=True), fewer ranks, a smaller micro_batch, or BatchNorm",
            )
        if most > 1:
            raise LayoutError(
                "SyncBatchNorm normalises over the ranks' simultaneous micro-batches: with accumulation the result "
                "depends on the number of ranks",
                do="use BatchNorm with a larger micro_batch, or one micro-batch a rank",
            )

    def begin(self) -> None:
        """Remember the values before the step's first forward pass."""
        self._before = self._copies()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """A forward pass in this block leaves no trace in the model's buffers, running statistics among them."""
        before = [
            (module, name, value, value.clone())
            for module in self._model.modules()
            for name, value in module._buffers.items()  # noqa: SLF001 - a pass may put another tensor in its place
            if value is not None
        ]
        try:
            yield
        finally:
            for module, name, value, old in before:
                module._buffers[name] = value.copy_(old)  # noqa: SLF001

    def compose(self) -> None:
        """Give every rank the values after all ranks' micro-batches, in their order. Collective."""
        if not self._layers or self._strategy.ranks == 1:
            return
        now = [value for layer in self._layers for value in _values(layer)]
        flat = torch.cat([value.detach().reshape(-1).double() for value in now])
        before = torch.cat([value.reshape(-1).double() for value in self._before])
        combined = _compose(flat, before, self._strategy.gather(flat), self._momenta())
        for value, part in zip(now, combined.split([value.numel() for value in now]), strict=True):
            value.copy_(part.view_as(value))

    def _copies(self) -> list[Tensor]:
        return [value.clone() for layer in self._layers for value in _values(layer)]

    def _momenta(self) -> list[tuple[int, float | None]]:
        """For each layer how many numbers it keeps and its momentum."""
        return [(sum(value.numel() for value in _values(layer)), layer.momentum) for layer in self._layers]


def _compose(flat: Tensor, before: Tensor, ranks: list[Tensor], layers: list[tuple[int, float | None]]) -> Tensor:
    sizes = [size for size, _ in layers]
    parts = []
    for index, (_, momentum) in enumerate(layers):
        old = before.split(sizes)[index]
        parts.append(_compose_layer(old, [rank.split(sizes)[index] for rank in ranks], momentum))
    return torch.cat(parts).to(flat.device)


def _compose_layer(old: Tensor, ranks: list[Tensor], momentum: float | None) -> Tensor:
    """The last number of a layer is its count of passes; the others are statistics."""
    value, count = old[:-1].clone(), old[-1].clone()
    for rank in ranks:
        passes = rank[-1] - old[-1]
        if momentum is None:
            gained = rank[:-1] * rank[-1] - old[:-1] * old[-1]
            value = torch.where(passes > 0, (value * count + gained) / (count + passes).clamp(min=1), value)
        else:
            kept = (1 - momentum) ** passes
            value = torch.where(passes > 0, kept * value + (rank[:-1] - kept * old[:-1]), value)
        count = count + passes
    return torch.cat([value, count.view(1)])


def _tracks(layer: _BatchNorm) -> bool:
    """SyncBatchNorm's are equal on all ranks already."""
    return layer.running_mean is not None and not isinstance(layer, nn.SyncBatchNorm)


def _values(layer: _BatchNorm) -> list[Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return [layer.running_mean, layer.running_var, layer.num_batches_tracked]
