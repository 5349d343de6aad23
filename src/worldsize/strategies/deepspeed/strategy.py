"""Room: DeepSpeed's engine. Knows how it is made, fed and asked; nothing of steps or checkpoints.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from worldsize.errors import ConfigError, LayoutError, MissingExtraError, StepError
from worldsize.runtime import env
from worldsize.runtime.stretch import Stretch
from worldsize.strategies import building
from worldsize.strategies.base import brief
from worldsize.strategies.deepspeed import config
from worldsize.strategies.deepspeed.fragments import Fragments, Grouped, Shards, Single
from worldsize.strategies.deepspeed.optimizer import PartitionedOptimizer
from worldsize.strategies.norm import gradients, limit_, norm
from worldsize.strategies.outputs import mapped
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import route
from worldsize.strategies.transform import compile_in_place, recompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from worldsize.runtime.session import Session
    from worldsize.strategies.base import Options, Padding, Setting

_WHOLE = ("Muon", "LBFGS", "Adafactor", "SparseAdam")
"""Optimizers of torch that look at a parameter as a whole, which no rank has."""


class DeepSpeed(Ranked):
    """ZeRO: optimizer state, gradients and parameters in shards, as far as the stage says."""

    name = "deepspeed"
    padding: ClassVar[Padding] = "equal"
    rehearses: ClassVar[bool] = False
    stage: ClassVar[int | None] = None
    """The stage that the strategy's name says."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if self.grid.shares < self.grid.world:
            raise LayoutError(
                "strategy 'deepspeed' lays a model over all ranks",
                found=f"tp={setting.sizes.tp}, pp={setting.sizes.pp}, cp={setting.sizes.cp}",
                do="leave these at 1, or choose another strategy",
            )
        self._library = _join(setting.session)
        self._entries: dict[nn.Module, _Entry] = {}
        self._open: list[_Entry] = []

    def replicas(self, shares: int) -> int:
        """Every rank holds shards of its own."""
        del shares
        return 1

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The whole model on the device. It is cut when its optimizer is made: groups are chosen by shapes."""
        model = building.whole(build, options, self.setting.precision, self.device)
        self.refuse_differences(model)
        scalars = [name for name, value in model.named_parameters() if value.dim() == 0]
        if scalars:
            raise LayoutError(
                "strategy 'deepspeed' cuts parameters along their first dimension, and some have none",
                found=brief(scalars),
                do="give them the shape (1,), or use strategy='ddp' for this model",
            )
        if options.unused_parameters == "allow":
            raise ConfigError(
                "unused_parameters='allow': DeepSpeed moves every parameter of a group in every step",
                do="use strategy='ddp' for this model",
            )
        recompute(model, options)
        self._entries[model] = entry = _Entry(model, options, self.setting)
        return route(model, entry, self.setting.precision, self.device)

    def adopt(self, optimizer: Optimizer, models: Sequence[nn.Module], clip: float | None) -> Optimizer:
        """Give model and optimizer to DeepSpeed. Collective.

        Raises:
            LayoutError: DeepSpeed could not hold them.
            ConfigError: its JSON contradicts the run.
        """
        entry = self._entries[models[0]]
        if len(models) != 1 or entry.engine is not None:
            raise LayoutError(
                "strategy 'deepspeed' has one optimizer for each model", found=f"{len(models)} models, or a second optimizer",
                do="give each model an optimizer of its own, or choose another strategy",
            )  # fmt: skip
        settled = self._settle(entry, optimizer, clip)
        if settled.idle:
            self.notes.append(f"of DeepSpeed's JSON without effect here: {', '.join(settled.idle)}")
        _refuse_whole(optimizer, settled)
        adopted = PartitionedOptimizer(optimizer, {value: value.shape for value in entry.model.parameters()})
        entry.start(self._library, self._made(optimizer), adopted, settled, Shards(self._host, self.device))
        compile_in_place(entry.model, entry.options)
        return adopted

    def open(self, model: nn.Module, batches: Sequence[Any]) -> None:
        """Remember whose turn it is: the backward pass does not say it."""
        del batches
        entry = self._entries[model]
        self._open = [each for each in self._open if each is not entry] + [entry]

    def close(self, model: nn.Module) -> None:
        """The turn's backward passes are over."""
        self._open = [each for each in self._open if each.model is not model]

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Gradients are there for the optimizer after the last micro-batch."""
        entry = self._entries[model]
        entry.train(trained=True)
        super().exchange(model, last=last)
        entry.begin(last=last)

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """Its parameters get no gradients in other models' turns."""
        del last
        self._entries[model].train(trained=False)

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Through the engine, which reduces gradients meanwhile."""
        if len(self._open) != 1:
            raise StepError(
                "one turn trains several models under strategy 'deepspeed'", found=f"{len(self._open)} models",
                do="open a turn for each of them: with step.turn(optimizer)",
            )  # fmt: skip
        (entry,) = self._open
        entry.engine.backward((losses * weights).sum(), scale_wrt_gas=False)

    def sent(self, model: nn.Module) -> None:
        """Raises StepError where a parameter got no gradient: the ranks' sums would not fit together."""
        missing = self._entries[model].missing()
        if missing:
            raise StepError(
                "parameters got no gradient in a micro-batch",
                found=brief(missing),
                do="use them in each one, or freeze them before run.model",
            )

    def without_gradient(self, model: nn.Module) -> list[str]:
        """None: each backward pass was looked at, and gradients lie elsewhere by now."""
        del model
        return []

    def clip_(
        self, parameters: Sequence[nn.Parameter], *, divisor: float, most: float | None, wanted: bool
    ) -> Tensor | None:
        """The same on the parts of gradients that this rank has."""
        entry = next(each for each in self._entries.values() if parameters[0] in each.own)
        grads = gradients(parameters) if entry.fragments is None else entry.fragments.gradients()
        size = None
        if wanted:
            size = norm(grads, self.device)
            if entry.fragments is not None:
                squared = size.square()
                dist.all_reduce(squared)
                size = squared.sqrt()
            size = size / divisor
        limit_(grads, size, divisor, most)
        return size

    def held(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's parts of parameters, in the precision of the optimizer; buffers whole."""
        return self._entries[model].held()

    def changed(self, model: nn.Module) -> None:
        """Tell all ranks the values of the parts."""
        fragments = self._entries[model].fragments
        if fragments is not None:
            fragments.spread()

    def state(self, model: nn.Module, held: Mapping[str, Tensor] | None = None) -> Mapping[str, Any]:
        """Shards in host memory, made one parameter after another."""
        return self._entries[model].state(held)

    def room(self, model: nn.Module, held: Mapping[str, Tensor] | None = None) -> Mapping[str, Any]:
        """The parts themselves: a rank reads what it holds, and nothing is gathered."""
        return self._entries[model].room(held)

    def filled(self, model: nn.Module, state: Mapping[str, Any], held: Mapping[str, Tensor] | None = None) -> None:
        """Back into the parts, one parameter after another."""
        self._entries[model].fill(state, held)
        if held is None:
            self.changed(model)

    @cached_property
    def _host(self) -> DeviceMesh:
        made: DeviceMesh = init_device_mesh("cpu", (self.grid.world,), mesh_dim_names=("dp_shard",))
        return made

    def _settle(self, entry: _Entry, optimizer: Optimizer, clip: float | None) -> config.Settled:
        given = env.read().get(config.VARIABLE) or entry.options.deepspeed
        return config.settle(
            config.read(given),
            config.Asked(
                world=self.grid.world, global_batch=self.setting.batch[0], micro_batch=self.setting.batch[1],
                precision=self.setting.precision.name, clip=clip, stage=self.stage, named=self.name,
                optimizer=config.described(optimizer), hidden=_hidden(entry.model), device=self.device.type,
            ),
        )  # fmt: skip

    @staticmethod
    def _made(optimizer: Optimizer) -> Optimizer:
        """Without parameters that are not trained, which DeepSpeed would look for in its partitions."""
        for group in optimizer.param_groups:
            group["params"] = [value for value in group["params"] if value.requires_grad]
        return optimizer


class Zero0(DeepSpeed):
    """Everything whole on every rank."""

    name, stage = "zero0", 0


class Zero1(DeepSpeed):
    """Optimizer state in shards."""

    name, stage = "zero1", 1


class Zero2(DeepSpeed):
    """Optimizer state and gradients in shards."""

    name, stage = "zero2", 2


class Zero3(DeepSpeed):
    """Optimizer state, gradients and parameters in shards."""

    name, stage = "zero3", 3


class _Entry:
    """The way into one model, and its engine once there is one."""

    def __init__(self, model: nn.Module, options: Options, setting: Setting) -> None:
        self.model, self.options, self._kind = model, options, type(model)
        self.own = set(model.parameters())
        self.engine: Any = None
        self.fragments: Fragments | None = None
        self._optimizer: PartitionedOptimizer | None = None
        self._shards: Shards | None = None
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._shapes = {value: value.shape for value in self.own}
        self._trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._seen: set[str] = set()
        self._training = True
        self._low = False
        """Whether parameters themselves are in the lower precision. Then all of the model is, as DeepSpeed has it."""
        self._setting = setting
        for name, value in self._trained.items():
            value.register_post_accumulate_grad_hook(partial(self._arrive, name))

    def start(
        self,
        library: Any,
        optimizer: Optimizer,
        adopted: PartitionedOptimizer,
        settled: config.Settled,
        shards: Shards,
    ) -> None:
        """Make the engine. Collective."""
        self.engine = _initialize(library, self.model, optimizer, settled, self._setting)
        inner = self.engine.optimizer
        self._low = bool(settled.values.get("bf16", {}).get("enabled"))
        if settled.stage:
            frozen = [value for value in self.own if not value.requires_grad]
            self.fragments = Grouped(inner) if settled.stage < 3 else Single(inner, frozen)  # noqa: PLR2004
        self._optimizer, self._shards = adopted, shards
        adopted.drive(self.engine, self.fragments, shards)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Through the engine, whose hooks stand around the model's call: `forward` is the wanted method meanwhile."""
        name = "forward" if method == "__call__" else method
        inner = partial(getattr(self._kind, name), self.model)
        if self.engine is None:
            return self._kind.__call__(self.model, *args, **kwargs) if name == "forward" else inner(*args, **kwargs)
        low = self._setting.precision.autocast
        if low is not None and self._low:
            args, kwargs = mapped(partial(_as, low), (args, kwargs))
        elif low is not None:
            # DeepSpeed switches off an autocast that it was not told of.
            inner = torch.autocast(self._setting.session.device.type, low)(inner)
        vars(self.model)["forward"] = inner
        try:
            if not self._training:
                # The engine's own hooks would begin a backward pass of this model in another one's turn.
                return self._kind.__call__(self.model, *args, **kwargs)
            return self.engine(*args, **kwargs)
        finally:
            del vars(self.model)["forward"]

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins."""
        assert self._optimizer is not None
        self._seen.clear()
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._optimizer.pending = True

    def train(self, *, trained: bool) -> None:
        """Whether gradients flow into the parameters."""
        if self._training is not trained:
            self._training = trained
            for value in self._trained.values():
                value.requires_grad_(trained)

    def missing(self) -> list[str]:
        """Trained parameters without gradient in the backward pass that just ended."""
        return [name for name in self._trained if name not in self._seen]

    def held(self) -> dict[str, Tensor]:
        """See `DeepSpeed.held`."""
        state = self.model.state_dict()
        parts: dict[nn.Parameter, Tensor] = {}
        for value in self._names.values():
            if self._cut(value) and value not in parts:
                assert self.fragments is not None
                part = self.fragments.part(value)
                parts[value] = part.of(part.flat)
        return {name: parts[self._names[name]] if self._is_cut(name) else state[name].detach() for name in state}

    def state(self, held: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """See `DeepSpeed.state`."""
        found: dict[str, Tensor] = {}
        made: dict[nn.Parameter, Tensor] = {}
        for name, value in (self.held() if held is None else held).items():
            if not self._is_cut(name):
                found[name] = value
                continue
            parameter = self._names[name]
            if parameter not in made:
                assert self.fragments is not None
                assert self._shards is not None
                made[parameter] = self._shards.gather(self.fragments.part(parameter), value, self._shapes[parameter])
            found[name] = made[parameter]
        return found

    def room(self, held: Mapping[str, Tensor] | None) -> dict[str, Tensor | Stretch]:
        """See `DeepSpeed.room`."""
        found: dict[str, Tensor | Stretch] = {}
        for name, value in (self.held() if held is None else held).items():
            found[name] = value
            if self._is_cut(name):
                assert self.fragments is not None
                parameter = self._names[name]
                found[name] = Stretch(value, self._shapes[parameter], self.fragments.part(parameter).begin)
        return found

    def fill(self, state: Mapping[str, Any], held: Mapping[str, Tensor] | None) -> None:
        """See `DeepSpeed.filled`."""
        done: set[nn.Parameter] = set()
        for name, value in (self.held() if held is None else held).items():
            if self._is_cut(name) and self._names[name] not in done and not isinstance(state[name], Stretch):
                done.add(self._names[name])
                assert self.fragments is not None
                Shards.scatter(state[name], self.fragments.part(self._names[name]), value)

    def _is_cut(self, name: str) -> bool:
        return name in self._names and self._cut(self._names[name])

    def _cut(self, value: nn.Parameter) -> bool:
        if self.fragments is None:
            return False
        return isinstance(self.fragments, Single) or value in set(self._trained.values())

    def _arrive(self, name: str, value: Tensor) -> None:
        del value
        self._seen.add(name)


def _as(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _refuse_whole(optimizer: Optimizer, settled: config.Settled) -> None:
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim", "deepspeed.ops")) and kind.__name__ not in _WHOLE
    if known:
        settled.values["zero_allow_untested_optimizer"] = True
    elif settled.stage and not settled.values.get("zero_allow_untested_optimizer"):
        raise LayoutError(
            f"ZeRO moves flat parts of parameters, and {kind.__name__} may look at them as a whole",
            found=f"stage {settled.stage}",
            do="where it works number by number, say zero_allow_untested_optimizer: true in DeepSpeed's JSON; else choose fsdp",
        )


def _hidden(model: nn.Module) -> int | None:
    """What a model says of its width, for DeepSpeed's bucket sizes."""
    said = getattr(model, "config", None)
    found = next((getattr(said, name) for name in ("hidden_size", "d_model", "dim") if hasattr(said, name)), None)
    return found if isinstance(found, int) else None


# --- the library

_met: list[Session] = []
"""The session whose process groups DeepSpeed knows."""


def _join(session: Session) -> Any:
    """DeepSpeed's module, with its process groups those of this session.

    Raises:
        MissingExtraError: it is not installed.
    """
    if find_spec("deepspeed") is None:
        raise MissingExtraError.of("deepspeed", "deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with env.lent({"DS_ACCELERATOR": session.device.type}):
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On the CPU it would compile collectives of its own for minutes, behind a lock that a killed process leaves for ever.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    if _met and _met[0] is not session:
        from deepspeed.utils import groups

        groups._release_process_group_references()  # noqa: SLF001 - the groups of an earlier session are gone
        deepspeed.comm.comm.cdb = None
    _met[:] = [session]
    return deepspeed


def _initialize(
    library: Any, model: nn.Module, optimizer: Optimizer, settled: config.Settled, setting: Setting
) -> Any:
    world = setting.session.world
    place = str(setting.session.device.index or 0)
    variables = {
        "RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": place,
        "MASTER_ADDR": world.master_addr or "127.0.0.1", "MASTER_PORT": str(world.master_port or 1),
    }  # fmt: skip
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env.read():
        variables["OMPI_COMM_WORLD_LOCAL_RANK"] = place
    with env.lent(variables), _in_precision(library, settled, setting):
        try:
            engine, *_ = library.initialize(model=model, optimizer=optimizer, config=settled.values)
        except (ValueError, AssertionError, library.runtime.config.DeepSpeedConfigError) as error:
            raise ConfigError("DeepSpeed refuses its JSON", found=" ".join(str(error).split())) from error
    return engine


@contextmanager
def _in_precision(library: Any, settled: config.Settled, setting: Setting) -> Iterator[None]:
    """DeepSpeed has no word for float64, and would compute in float32: here it is told where it asks for a dtype."""
    if setting.precision.parameters is not torch.float64:
        yield
        return
    engine, zero = library.runtime.engine.DeepSpeedEngine, library.runtime.base_optimizer.ZeROOptimizer
    partitioning = library.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses
    wide = torch.float64
    accelerator = library.accelerator.get_accelerator()
    known = accelerator.supported_dtypes()
    if wide not in known:
        accelerator.supported_dtypes = lambda: [*known, wide]  # asked at each exchange of stage 0
    with ExitStack() as patches:
        patches.enter_context(_instead(library.runtime.config, "get_communication_data_type", lambda *_, **__: wide))
        if settled.stage:
            patches.enter_context(_instead(engine, "get_data_types", lambda _: (wide, wide)))
            patches.enter_context(_instead(zero, "_configure_master_weights", lambda *_, **__: wide))
            patches.enter_context(_instead(partitioning, "_set_dtype", _any_dtype))
        yield


def _any_dtype(context: Any, *_: Any) -> None:
    context.dtype = torch.float32


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
