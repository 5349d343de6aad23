"""Room: stages that are whole on each of their ranks: gradients are summed once, after a turn's last backward pass.

Torch's DistributedDataParallel exchanges the first backward pass after a forward pass, and in a pipeline several forward
passes come before it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from worldsize.strategies import building
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import route
from worldsize.strategies.transform import transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from worldsize.strategies.base import Options, Padding, Setting


class Flat(Ranked):
    """A whole stage on each rank that has it."""

    name = "ddp"
    padding: ClassVar[Padding] = "one"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._options: dict[nn.Module, Options] = {}

    @property
    def averaged(self) -> int:
        """Gradients are summed."""
        return 1

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The stage on the device."""
        model = building.whole(build, options, self.setting.precision, self.device)
        self.refuse_differences(model)
        transform(model, options)
        placed = route(model, None, self.setting.precision, self.device)
        self._options[placed] = options
        return placed

    def close(self, model: nn.Module) -> None:
        """Sum all gradients over the ranks that have the same stage. One that no rank has stays away."""
        super().close(model)
        trained = [value for value in model.parameters() if value.requires_grad]
        if self.ranks == 1 or not trained:
            return
        used = torch.tensor([float(value.grad is not None) for value in trained], device=self.device)
        grads = [value.grad if value.grad is not None else torch.zeros_like(value) for value in trained]
        buckets = [_Bucket(group) for group in _grouped(grads, self._options[model].bucket_mb * 2**20)]
        works = [
            dist.all_reduce(flat, group=self.peers, async_op=True)
            for flat in (used, *(each.flat for each in buckets))
        ]
        for work in works:
            assert work is not None
            work.wait()
        for bucket in buckets:
            bucket.spread()
        for value, grad, ranks in zip(trained, grads, used.tolist(), strict=True):
            value.grad = grad if ranks else None

    def check_gradients(self, model: nn.Module) -> list[str]:
        """What no rank used, unless that is allowed; on one rank nothing is lost by it."""
        if self.ranks == 1 or self._options[model].unused_parameters == "allow":
            return []
        return self.without_gradient(model)


class _Bucket:
    """Gradients side by side, so that one call sums them."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._grads = grads
        self.flat = torch.cat([grad.reshape(-1) for grad in grads])

    def spread(self) -> None:
        """Put the sums back."""
        parts = self.flat.split([grad.numel() for grad in self._grads])
        torch._foreach_copy_(list(self._grads), [p.view_as(g) for p, g in zip(parts, self._grads, strict=True)])


def _grouped(grads: Sequence[Tensor], most: float) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to so many bytes."""
    for _, same in itertools.groupby(grads, key=lambda grad: grad.dtype):
        group: list[Tensor] = []
        for grad in same:
            if group and sum(each.nbytes for each in group) + grad.nbytes > most:
                yield group
                group = []
            group.append(grad)
        yield group
