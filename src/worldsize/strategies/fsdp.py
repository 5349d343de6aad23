"""Room: torch's FSDP2 (`fully_shard`): parameters, gradients and optimizer state in shards, gathered unit by unit.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO",
SC 2020 (stage 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn.modules.batchnorm import _BatchNorm

from worldsize.errors import ConfigError, LayoutError, StepError
from worldsize.runtime.sharded import plain
from worldsize.strategies import building
from worldsize.strategies.base import Options, Padding, Setting, brief
from worldsize.strategies.outputs import tensors
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import methods, route
from worldsize.strategies.transform import chosen, compile_in_place, recompute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from worldsize.runtime.comm import Comm


class FSDP(Ranked):
    """Every parameter in equal shards over all ranks."""

    name = "fsdp"
    padding: ClassVar[Padding] = "equal"

    def replicas(self, shares: int) -> int:
        """Every rank holds shards of its own."""
        del shares
        return 1

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._entries: dict[nn.Module, _Entry] = {}

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model in shards: each repeated block is one unit, what is left another.

        Order: recomputation first (a unit is gathered again for it), then shards from the inside out, then
        compilation, so that gathering stays outside of the compiled regions.
        """
        if options.compile and self.parts is not None:
            raise ConfigError(
                "compile= with cp", found=f"compile={options.compile!r}", do="leave compile out, or use no cp"
            )
        home = torch.device("cpu") if options.offload else self.device
        model, fill = building.begin(build, options, self.setting.precision, home)
        _refuse_scalars(model)
        if options.init == "here":
            self.refuse_differences(model)
        extra = methods(type(model))
        recompute(model, options, self.parts)
        units = self._shard(model, _then(self.split(model, fill, options), options.ready), options)
        compile_in_place(model, options)
        self._entries[model] = entry = _Entry(model, extra, units=units, allow=options.unused_parameters == "allow")
        return route(model, self.guarded(model, entry), self.setting.precision, self.device)

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Gradients are reduced to their shards in the backward pass of the last micro-batch only."""
        super().exchange(model, last=last)
        self.stand_by(model, last=last)

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """As in its own turn: gradients that were not reduced would be kept inside, out of reach of zero_grad."""
        self._entries[model].begin(last=last)

    def sent(self, model: nn.Module) -> None:
        """Notes whether the backward pass went through the model."""
        self._entries[model].sent()

    def forget(self, model: nn.Module) -> None:
        """Units are shards again, and waiting for a first pass, wherever an error ended the last one."""
        self._entries[model].forget()
        super().forget(model)

    def check_gradients(self, model: nn.Module) -> list[str]:
        """What this rank did not use, or what no rank used where that is allowed."""
        entry = self._entries[model]
        entry.refuse_unreduced()
        if not entry.allow:
            return entry.used.missing()
        entry.used.drop_zeros(self.setting.session.comm)
        return []

    def held(self, model: nn.Module) -> dict[str, Tensor]:
        """Shards without their own ways of being gathered, which nothing but the wrapper knows."""
        return {name: plain(value) for name, value in super().held(model).items()}

    def state(self, model: nn.Module, held: Mapping[str, Tensor] | None = None) -> Mapping[str, Any]:
        """The same."""
        return {name: plain(value) for name, value in super().state(model, held).items()}

    def _shard(self, model: nn.Module, fill: Callable[[nn.Module], None], options: Options) -> int:
        """Fill and shard from the inside out. Returns in how many units with parameters the model lies."""
        common: dict[str, Any] = {"mesh": self.shards, "offload_policy": self._offload(options)}
        units = _whole_ties(model, chosen(model, options.wrap))
        if self.setting.precision.autocast is not None:
            # Batch normalisation keeps its statistics in float32 and wants its weights in the same.
            norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module is not model]
            for norm in norms:
                fill(norm)
                fully_shard(norm, mp_policy=MixedPrecisionPolicy(), **common)
        ordered = [module for module in model.modules() if module in units]
        freed = ordered[: round(options.reshard * len(ordered))]
        for unit in [unit for unit in units if not isinstance(unit, FSDPModule)]:
            fill(unit)
            fully_shard(unit, reshard_after_forward=unit in freed, mp_policy=self._mixed(), **common)
        fill(model)
        fully_shard(model, mp_policy=self._mixed(), **common)
        return sum(isinstance(module, FSDPModule) and bool(_managed(module)) for module in model.modules())

    def _mixed(self) -> MixedPrecisionPolicy:
        low = self.setting.precision.autocast
        return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)

    def _offload(self, options: Options) -> OffloadPolicy:
        if not options.offload:
            return OffloadPolicy()
        if self.device.type != "cuda":
            raise ConfigError(
                "offload=True keeps shards in host memory", found="they are there already", do="drop it"
            )
        return CPUOffloadPolicy()


class HSDP(FSDP):
    """Shards within a group of ranks, and copies of them between the groups: one a host, if nothing else is said."""

    name = "hsdp"

    def replicas(self, shares: int) -> int:
        """As many as were asked for, or as there are hosts."""
        del shares
        return self.setting.sizes.replicas or self.setting.session.world.nodes


class Copies(FSDP):
    """What ddp is where a rank holds a part of each tensor: copies that are shards of one, summed by the same hooks."""

    name = "ddp"

    def replicas(self, shares: int) -> int:
        """Every share of the batch has a whole copy."""
        return shares


class _Entry:
    """The way into one sharded model: the call gathers by its own hooks, other methods by ones made here."""

    def __init__(self, model: nn.Module, extra: list[str], *, units: int, allow: bool) -> None:
        self._model: Any = model
        self._units, self.allow, self.used = units, allow, _Used(model)
        if allow:
            self.used.refuse_allowing()
        self._trained = any(value.requires_grad for value in model.parameters())
        self._told: bool | None = None
        self._last = self._flowed = self._earlier = self._second = False
        for name in extra:
            setattr(model, _inner(name), getattr(type(model), name).__get__(model))
            register_fsdp_forward_method(model, _inner(name))
        self._call: Callable[..., Any] = type(model).__call__

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in ("__call__", "forward"):
            output = self._call(self._model, *args, **kwargs)
        else:
            output = getattr(self._model, _inner(method))(*args, **kwargs)
        if torch.is_grad_enabled():
            self._watch(output)
        else:
            # Whole parameters that stay after a pass without backward would hide a later change of the shards.
            self._model.reshard()
        return output

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins."""
        if last is not self._told:  # it takes as long as some launches to go through all units
            self._model.set_is_last_backward(last)
            self._model.set_requires_gradient_sync(last)
            self._told = last
        self._last, self._flowed = last, False

    def sent(self) -> None:
        """A backward pass has ended."""
        if self._second:
            self._second = False
            self._model.set_reshard_after_backward(reshard_after_backward=True)
            self._model.reshard()
        self._earlier = (self._earlier or self._flowed) and not (self._last and self._flowed)

    def forget(self) -> None:
        """Passes so far are none."""
        _reset(self._model)
        self.used.missing()
        self._told = None
        self._flowed = self._earlier = self._second = False

    def refuse_unreduced(self) -> None:
        """Raises StepError where earlier micro-batches left gradients that the last one did not reduce."""
        if self._earlier:
            self._earlier = False
            raise StepError(
                "the last micro-batch's backward pass did not reach the model, so that its gradients were not exchanged",
                do="let every micro-batch's loss depend on the model's output, with weight 0 where it shall not count",
            )

    def _watch(self, output: Any) -> None:
        self.used.watch()
        passed = [value for value in tensors(output) if value.requires_grad]
        for value in passed:
            value.register_hook(self._passing)
        if not passed:  # all that is computed here is frozen: no backward pass will free whole parameters
            self._model.reshard()

    def _passing(self, grad: Tensor) -> None:
        del grad
        self._flowed = True
        if not torch.is_grad_enabled() or not self._trained:
            return
        # The graph of a first derivative is being made: its saved weights must live until the second one is done.
        self._second = True
        self._model.set_reshard_after_backward(reshard_after_backward=False)
        if self._units > 1:
            raise LayoutError(
                f"a second derivative through a model that fsdp holds in {self._units} units would be lost, partly in silence",
                do="run.model(..., wrap=()) makes it one unit; or use strategy='ddp' for this model",
            )


def _then(
    fill: Callable[[nn.Module], None], ready: Callable[[nn.Module], None] | None
) -> Callable[[nn.Module], None]:
    if ready is None:
        return fill

    def both(unit: nn.Module) -> None:
        fill(unit)
        ready(unit)

    return both


def _inner(name: str) -> str:
    return f"_sharded_{name}"


def _whole_ties(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Leave out units that share a parameter with what is outside of them: sharding one side would cut the tie."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for value in module._parameters.values():  # noqa: SLF001 - the public lists name a shared one once
            if value is not None:
                owners.setdefault(value, set()).add(module)
    tied = [modules for modules in owners.values() if len(modules) > 1]
    return [unit for unit in units if not any(_cuts(set(unit.modules()), modules) for modules in tied)]


def _cuts(inside: set[nn.Module], owners: set[nn.Module]) -> bool:
    return bool(owners & inside) and not owners <= inside


def _managed(unit: nn.Module) -> list[Any]:
    """What the wrapper itself knows of each parameter of one unit."""
    return [value for group in _groups(unit) for value in group.fsdp_params]


def _groups(unit: nn.Module) -> list[Any]:
    """Of one unit; torch before 2.12 has at most one, newer ones several."""
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def _reset(model: nn.Module) -> None:
    """What `reset_iter_state` of newer torch does, for older ones too: every unit idle and in shards, nothing accumulated."""
    states = [fully_shard.state(unit) for unit in model.modules() if isinstance(unit, FSDPModule)]  # type: ignore[attr-defined]
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()  # type: ignore[operator]
    else:
        _reset_older(model, states)
    for value in [value for unit in model.modules() if isinstance(unit, FSDPModule) for value in _managed(unit)]:
        value.unsharded_accumulated_grad = None
        if getattr(value, "_unsharded_param", None) is not None:
            value._unsharded_param.grad = None  # noqa: SLF001 - the wrapper has no word for this


def _reset_older(model: nn.Module, states: list[Any]) -> None:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    for unit in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        for group in _groups(unit):
            group.finalize_backward()
            group._training_state = TrainingState.IDLE  # noqa: SLF001
            group._to_sharded()  # noqa: SLF001
    for state in states:
        state._training_state = TrainingState.IDLE  # noqa: SLF001
        state._state_ctx.iter_forward_root = None  # noqa: SLF001
        state._state_ctx.post_backward_final_callback_queued = False  # noqa: SLF001
        state._comm_ctx.post_forward_order.clear()  # noqa: SLF001
        state._comm_ctx.all_gather_state = None  # noqa: SLF001
        if hasattr(state._comm_ctx, "reduce_scatter_state"):  # noqa: SLF001
            state._comm_ctx.reduce_scatter_state = None  # noqa: SLF001


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [name for name, value in model.named_parameters() if value.dim() == 0]
    if scalars:
        raise LayoutError(
            "fsdp shards parameters along their first dimension, and some have none",
            found=brief(scalars),
            do="give them the shape (1,), or use strategy='ddp' for this model",
        )


class _Used:
    """Which parameters of a model got gradients on this rank.

    Ranks that use different parameters would reduce different ones: the wrapper lets missing gradients take part as
    zeros, and here they are still told from true ones.
    """

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        names = {value: name for name, value in model.named_parameters() if value.requires_grad}
        self._exact = hasattr(model, "set_reduce_scatter_unused_params")
        if self._exact:
            model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        managed = [value for unit in units for value in _managed(unit)]
        self._trained = {names[value.sharded_param]: value for value in managed if value.sharded_param in names}
        self._waiting, self._seen = dict(self._trained), set[str]()

    def refuse_allowing(self) -> None:
        """Raises ConfigError where ranks that use different parameters would not fit together."""
        if not self._exact:
            raise ConfigError(
                "unused_parameters='allow' under fsdp needs a newer torch",
                found=torch.__version__,
                do="use strategy='ddp' for this model",
            )

    def watch(self) -> None:
        """Before a backward pass: whole parameters exist from their first gathering on."""
        for name, value in list(self._waiting.items()):
            whole = getattr(value, "_unsharded_param", None)
            if whole is not None:
                del self._waiting[name]
                whole.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))

    def missing(self) -> list[str]:
        """Trained parameters without gradient on this rank since the last call."""
        found = [name for name in self._trained if name not in self._seen]
        self._seen.clear()
        return found

    def drop_zeros(self, comm: Comm) -> None:
        """What no rank used ends without gradient: optimizers leave it alone, as in one process. Collective."""
        missing = set(self.missing())
        used = comm.max([float(name not in missing) for name in self._trained])
        for value, anywhere in zip(self._trained.values(), used, strict=True):
            if not anywhere:
                value.sharded_param.grad = None
