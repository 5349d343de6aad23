"""Room: what DistributedDataParallel holds and sends, without its reducer, which fake tensors have no memory for.

Its buckets live from the beginning to the end. A gradient that is exchanged lies in its bucket (gradient_as_bucket_view);
those of micro-batches before the last one lie beside it until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_FIRST = 1 << 20
"""Bytes of the first bucket, which goes out soon."""


class Buckets(nn.Module):
    """Stands in for the wrapper.

    Args:
        module: what is wrapped.
        size: of a bucket, in bytes.
        find_unused: as the wrapper's.
    """

    def __init__(self, module: nn.Module, size: float, *, find_unused: bool) -> None:
        super().__init__()
        self.module, self.find_unused_parameters = module, find_unused
        self.require_backward_grad_sync, self.reducer = True, self
        self._kept: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        trained = [value for value in module.parameters() if value.requires_grad]
        for group in _cut(trained[::-1], size):
            self._fill(group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Straight through."""
        return self.module(*args, **kwargs)

    def _check_reducer_finalized(self) -> None:
        """It always is."""

    def _fill(self, group: list[nn.Parameter]) -> None:
        bucket = torch.empty(sum(value.numel() for value in group), dtype=group[0].dtype, device=group[0].device)
        self._kept.append(bucket)
        waiting, at = [len(group)], 0
        for value in group:
            self._views[value] = bucket[at : at + value.numel()].view(value.shape)
            at += value.numel()
            value.register_post_accumulate_grad_hook(lambda each: self._arrived(each, bucket, waiting, len(group)))

    def _arrived(self, value: Any, bucket: Tensor, waiting: list[int], count: int) -> None:
        if not self.require_backward_grad_sync:
            return
        view = self._views[value]
        if value.grad is not view:
            view.copy_(value.grad)
            value.grad = view
        waiting[0] -= 1
        if not waiting[0]:
            waiting[0] = count
            dist.all_reduce(bucket)


def _cut(values: list[nn.Parameter], size: float) -> Iterator[list[nn.Parameter]]:
    """As the wrapper does: in the order of gradients, by dtype, each closed when it is full."""
    most: float = _FIRST
    open_: dict[torch.dtype, list[nn.Parameter]] = {}
    for value in values:
        group = open_.setdefault(value.dtype, [])
        group.append(value)
        if sum(each.numel() * each.element_size() for each in group) >= most:
            yield open_.pop(value.dtype)
            most = size
    yield from open_.values()
