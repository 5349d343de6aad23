"""Room: torch's DistributedDataParallel. Knows its buckets and switches; nothing of steps or checkpoints.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.strategies.base import Options, Padding, Setting, Strategy, materialise
from worldsize.strategies.routing import route
from worldsize.strategies.transform import transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Door(nn.Module):
    """What DistributedDataParallel wraps: any method of the user's model, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self._kind = model, type(model)

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._kind, method)(self.model, *args, **kwargs)


class DDP(Strategy):
    """A whole model on each rank; gradients summed in buckets while the backward pass still runs."""

    name = "ddp"
    padding: ClassVar[Padding] = "one"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        setting.session.need_group()
        self._wrappers: dict[nn.Module, DistributedDataParallel] = {}

    @property
    def averaged(self) -> int:
        """DistributedDataParallel divides by the number of ranks."""
        return self.ranks

    def place(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model on the device, with its gradients exchanged through a wrapper that nobody sees."""
        model = materialise(build, self.setting.precision, self.device)
        transform(model, options)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return route(model, None, self.setting.precision, self.device)
        wrapper = DistributedDataParallel(
            _Door(model),
            broadcast_buffers=False,  # running statistics are composed exactly, see batchnorm
            find_unused_parameters=options.unused_parameters == "allow",
            gradient_as_bucket_view=True,
        )
        _fix_buckets(wrapper)
        self._wrappers[model] = wrapper
        return route(model, wrapper, self.setting.precision, self.device)

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Gradients are summed over ranks in the backward pass of the last micro-batch only."""
        if model in self._wrappers:
            self._wrappers[model].require_backward_grad_sync = last

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """Never: what this model's parameters get in another's turn is thrown away."""
        del last
        self.exchange(model, last=False)

    def check_gradients(self, model: nn.Module) -> list[str]:
        """A parameter without gradient leaves its whole bucket unsummed."""
        wrapper = self._wrappers.get(model)
        if wrapper is None or wrapper.find_unused_parameters:
            return []
        return [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]

    def sum_(self, tensor: Tensor) -> Any:
        """An all-reduce on the device's own backend."""
        return dist.all_reduce(tensor, async_op=True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """An all-gather on the device's own backend."""
        found = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(found, tensor.contiguous())
        return found


def _fix_buckets(wrapper: DistributedDataParallel) -> None:
    """Make the wrapper choose its buckets now, by one backward pass that counts for nothing.

    It would otherwise choose them anew after its first step, from the order in which gradients came. That changes the
    order of summation on three and more ranks (1e-8), and a resumed run, whose first step is another one, would
    differ by it from the run it continues. Nodes made in the order of definition run backward from the last one.
    """
    if wrapper.find_unused_parameters:
        return  # the wrapper keeps its first buckets in this mode
    trained = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
    wrapper.reducer.prepare_for_forward()
    wrapper.reducer.prepare_for_backward([])
    torch.autograd.backward([parameter.flatten()[:1].sum() * 0.0 for parameter in trained])
    wrapper.reducer._rebuild_buckets()  # noqa: SLF001 - forward would call it, one step too late
    for parameter in trained:
        parameter.grad = None
