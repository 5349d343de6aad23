"""Room: torch's FSDP2 (`fully_shard`): parameters, gradients and optimizer state in shards, gathered unit by unit.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO",
SC 2020 (stage 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from worldsize.errors import ConfigError
from worldsize.strategies.base import Options, Padding, Setting, materialise
from worldsize.strategies.ddp import DDP
from worldsize.strategies.routing import methods, route
from worldsize.strategies.transform import chosen, compile_in_place, recompute

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class FSDP(DDP):
    """Every parameter in equal shards over all ranks.

    Shares the small collectives with DDP: both lie over the same ranks.
    """

    name = "fsdp"
    padding: ClassVar[Padding] = "equal"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._mesh: DeviceMesh = init_device_mesh(self.device.type, (self.ranks,), mesh_dim_names=("data",))

    def place(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model in shards: each repeated block is one unit, what is left another.

        Order: recomputation first (a unit is gathered again for it), then shards from the inside out, then
        compilation, so that gathering stays outside of the compiled regions.
        """
        model = materialise(build, self.setting.precision, torch.device("cpu") if options.offload else self.device)
        extra, kind = methods(type(model)), type(model)
        recompute(model, options)
        shard = {"mesh": self._mesh, "mp_policy": self._mixed(), "offload_policy": self._offload(options)}
        for unit in chosen(model, options.wrap):
            fully_shard(unit, reshard_after_forward=options.reshard, **shard)
        fully_shard(model, **shard)
        compile_in_place(model, options)
        for name in extra:
            setattr(model, _inner(name), getattr(kind, name).__get__(model))
            register_fsdp_forward_method(model, _inner(name))
        return route(model, _Door(model), self.setting.precision, self.device) if extra else self._route_call(model)

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Gradients are reduced to their shards in the backward pass of the last micro-batch only."""
        assert isinstance(model, FSDPModule)
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """As in its own turn: gradients that were not reduced would be kept inside, out of reach of zero_grad."""
        self.exchange(model, last=last)

    def check_gradients(self, model: nn.Module) -> list[str]:
        """Shards without gradient harm nobody."""
        del model
        return []

    def layout(self) -> dict[str, Any]:
        """The mesh is a line of all ranks."""
        return {**super().layout(), "mesh": {"data": self.ranks}}

    def _route_call(self, model: nn.Module) -> nn.Module:
        return route(model, None, self.setting.precision, self.device)

    def _mixed(self) -> MixedPrecisionPolicy:
        low = self.setting.precision.autocast
        return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)

    def _offload(self, options: Options) -> OffloadPolicy:
        if not options.offload:
            return OffloadPolicy()
        if self.device.type != "cuda":
            raise ConfigError("offload=True keeps shards in host memory", found="they are there already", do="drop it")
        return CPUOffloadPolicy()


class _Door:
    """The way into any public method of a sharded model: the call itself gathers by its own hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "__call__":
            return type(self._model).__mro__[1].__call__(self._model, *args, **kwargs)
        return getattr(self._model, _inner(method))(*args, **kwargs)


def _inner(name: str) -> str:
    return f"_sharded_{name}"
