"""Room: how a model comes to be: built whole, or built without memory and filled module by module.

Built on the meta device, a model has shapes and no values. Each module that owns parameters or buffers then gets memory,
and its own `reset_parameters()` fills it under a random key made of the model's key and the module's path: the weights
depend neither on the strategy nor on the order of filling. What cannot be had in this way is refused by name: a module
without `reset_parameters`, a buffer that `reset_parameters` does not compute (tables made in `__init__`), tensors that are
plain attributes, and weights that the constructor wrote over after their module's own initialisation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from worldsize.errors import ConfigError, LayoutError
from worldsize.runtime.keys import number
from worldsize.runtime.seeds import reseeded
from worldsize.strategies.base import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from worldsize.strategies.base import Options
    from worldsize.strategies.precision import Precision

_BYTE = 0xA5
_OWN_INIT = "give it a reset_parameters() that fills its own parameters and buffers, or build with init='here'"


def begin(
    build: Callable[[], nn.Module], options: Options, precision: Precision, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Build a model.

    Args:
        build: makes it.
        options: `init` says how.
        precision: the parameters' dtype.
        device: where parameters shall lie.

    Returns:
        the model, and a function that gives memory and values to everything in one of its modules. Filled already
        where it was built whole.

    Raises:
        LayoutError: the model cannot be built in this way.
        ConfigError: an existing module was given together with init="meta".
    """
    if options.init == "here":
        model = build()
        _refuse_lazy(model)
        model.to(device=device, dtype=precision.parameters)
        for value in model.parameters():
            value.data = value.data.to(_dtype(value, precision, options))
        return model, _filled
    seed = torch.initial_seed()
    with _Writes() as written, torch.device("meta"):
        model = build()
    _refuse_lazy(model)
    _refuse_attributes(model)
    tensors = [*model.parameters(), *model.buffers()]
    if tensors and not any(value.is_meta for value in tensors):
        raise ConfigError("init='meta' builds the model itself", do="give run.model its class or a function")
    return model, _Filler(
        model, _owners(model, written.log), seed, partial(_dtype, precision=precision, options=options), device
    ).fill


def whole(build: Callable[[], nn.Module], options: Options, precision: Precision, device: torch.device) -> nn.Module:
    """Build and fill all of a model. Raises as `begin`."""
    model, fill = begin(build, options, precision, device)
    fill(model)
    return model


def _filled(_module: nn.Module) -> None:
    """Built with its values."""


def _refuse_lazy(model: nn.Module) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [
        name for name, value in tensors.items() if isinstance(value, UninitializedBuffer | UninitializedParameter)
    ]
    if lazy:
        raise LayoutError(
            "lazy modules have no shapes yet, and cannot be laid over ranks",
            found=brief(lazy),
            do="give their sizes, or run one batch through the model inside its builder",
        )


def _dtype(value: Tensor, precision: Precision, options: Options) -> torch.dtype:
    """What a parameter or buffer is held in."""
    if not value.is_floating_point():
        return value.dtype
    frozen = isinstance(value, nn.Parameter) and not value.requires_grad
    return (precision.autocast if frozen and options.low_frozen else None) or precision.parameters


class _Filler:
    """Gives memory and values to modules of one meta model, each once."""

    def __init__(
        self,
        model: nn.Module,
        owners: dict[Tensor, nn.Module],
        seed: int,
        dtype: Callable[[Tensor], torch.dtype],
        device: torch.device,
    ) -> None:
        self._owners, self._paths = owners, {module: path for path, module in model.named_modules()}
        self._seed, self._dtype, self._device = seed, dtype, device
        self._real: dict[Tensor, Tensor] = {}
        self._done: set[nn.Module] = set()
        self._awaited = Counter(value for module in model.modules() for value in _own(module).values())

    def fill(self, unit: nn.Module) -> None:
        """Everything inside `unit` that has no values yet, children first, as constructors do."""
        for module in _children_first(unit):
            if module not in self._done:
                self._done.add(module)
                given = list(_own(module).values())
                self._initialise(module)
                self._let_go(given)

    def _let_go(self, given: list[Tensor]) -> None:
        """What no other module waits for is its module's alone: kept here, it would stay whole beside its shards."""
        self._awaited.subtract(given)
        for value in given:
            if not self._awaited[value]:
                self._real.pop(value, None)

    def _initialise(self, module: nn.Module) -> None:
        shared = [
            self._real[value]
            for value in _own(module).values()
            if value in self._real and self._owners.get(value) is not module
        ]
        kept = {value: value.detach().clone() for value in shared}
        fresh = self._make_room(module)
        reset = _reset_of(module)
        if reset is None:
            if fresh:
                raise LayoutError("a module has no reset_parameters", found=self._named(module, fresh), do=_OWN_INIT)
            return
        sharded = {value: value._version for value in module.parameters() if hasattr(value, "device_mesh")}  # noqa: SLF001
        with reseeded(number(f"{self._seed} {self._paths[module]}"), self._device):
            reset()
        if any(value._version != version for value, version in sharded.items()):  # noqa: SLF001
            raise LayoutError(
                "reset_parameters writes into modules that are sharded as units of their own",
                found=self._paths[module] or type(module).__name__,
                do="let each block initialise itself, or build with init='here'",
            )
        with torch.no_grad():
            for value, before in kept.items():
                value.copy_(before)
        left = [name for name in fresh if _untouched(_own(module)[name])]
        if left:
            raise LayoutError(
                "reset_parameters leaves something unset", found=self._named(module, left), do=_OWN_INIT
            )
        for value in _own(module).values():
            if not hasattr(value, "device_mesh"):
                value.data = value.data.to(self._dtype(value))

    def _make_room(self, module: nn.Module) -> list[str]:
        """Replace meta tensors by memory that shows whether it was written. Returns the names of those not seen before."""
        fresh = []
        for name, value in _own(module).items():
            if value.is_meta and value not in self._real:
                data = _blank(value, self._device)
                trained = value.requires_grad
                self._real[value] = nn.Parameter(data, trained) if isinstance(value, nn.Parameter) else data
                fresh.append(name)
            new = self._real.get(value)
            if new is None:
                value.data = value.data.to(self._device)
            elif name in module._parameters:  # noqa: SLF001
                module._parameters[name] = new  # type: ignore[assignment] # noqa: SLF001
            else:
                module._buffers[name] = new  # noqa: SLF001
        return fresh

    def _named(self, module: nn.Module, names: list[str]) -> str:
        path = self._paths[module]
        return f"{type(module).__name__}: {brief([f'{path}.{name}' if path else name for name in names])}"


class _Writes(TorchDispatchMode):
    """Notes what is written into which storage, with its numbers: `normal_(0, 0.02)`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: dict[int, list[str]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):  # noqa: SLF001
            numbers = [str(value) for value in args[1:] if not isinstance(value, torch.Tensor)]
            self.log[_storage(args[0])].append(f"{func} {numbers}")
        return func(*args, **(kwargs or {}))


def _owners(model: nn.Module, built: Mapping[int, list[str]]) -> dict[Tensor, nn.Module]:
    """Which module initialises each parameter: of those that share it, the one that did so in the constructor.

    Raises:
        LayoutError: the last that the constructor wrote into a parameter is not what any of them would write.
    """
    rehearsed = {module: _rehearse(module) for module in _children_first(model)}
    found: dict[Tensor, nn.Module] = {}
    for value, sharing in _sharing(model).items():
        before = built.get(_storage(value), [])
        for owner in sharing:
            others = sharing.keys() - {owner}
            again = [
                write for module, log in rehearsed.items() if module not in others for write in log[_storage(value)]
            ]
            if value not in found and (not before or before[-len(again) :] == again):
                found[value] = owner
    lost = [name for name, value in model.named_parameters() if value.is_meta and value not in found]
    if lost:
        raise LayoutError(
            "init='meta' cannot repeat what the constructor writes outside of reset_parameters",
            found=brief(lost),
            do="override reset_parameters where they live, or build with init='here'",
        )
    return found


def _rehearse(module: nn.Module) -> dict[int, list[str]]:
    with _Writes() as writes, torch.random.fork_rng(devices=[]):
        reset = _reset_of(module)
        if reset is not None:
            reset()
    log: dict[int, list[str]] = writes.log
    return log


def _sharing(model: nn.Module) -> dict[Tensor, dict[nn.Module, None]]:
    """The modules of each meta parameter, in the order of filling."""
    found: dict[Tensor, dict[nn.Module, None]] = defaultdict(dict)
    for module in _children_first(model):
        for value in _own(module).values():
            if value.is_meta and isinstance(value, nn.Parameter):
                found[value][module] = None
    return found


def _refuse_attributes(model: nn.Module) -> None:
    plain = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if plain:
        raise LayoutError(
            "tensors that are neither parameters nor buffers are not filled by init='meta'",
            found=brief(plain),
            do="register them as buffers that reset_parameters computes, or build with init='here'",
        )


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _own(module: nn.Module) -> dict[str, Tensor]:
    found = {**module._parameters, **module._buffers}  # noqa: SLF001 - shared ones too, which the public lists leave out
    return {name: value for name, value in found.items() if value is not None}


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """Torch's own attention and transformers hide theirs behind an underscore."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _blank(value: Tensor, device: torch.device) -> Tensor:
    data = torch.empty_like(value, device=device, requires_grad=False)
    if data.is_floating_point():
        return data.fill_(torch.nan)
    data.reshape(-1).view(torch.uint8).fill_(_BYTE)
    return data


def _untouched(value: Tensor) -> bool:
    if value.is_meta:
        return True
    if value.is_floating_point():
        return bool(value.detach().isnan().any())
    return value.numel() > 0 and bool((value.detach().reshape(-1).view(torch.uint8) == _BYTE).all())


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)  # noqa: SLF001 - the address is null for every meta tensor
