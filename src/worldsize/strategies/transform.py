"""Room: changes to a model that keep its names: activation checkpointing and compilation, in place.

Order: activation checkpointing first, so that what is compiled contains the recomputation; then compile; a strategy
that shards does so between the two, so that each unit is gathered outside its compiled region.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.strategies.base import Options


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: entries of a ModuleList, or of a Sequential where a class with inner modules repeats.

    These are the units that sharding and recomputation work on: large enough to be worth a collective, small enough
    that two of them fit beside each other. Nested lists count at their outermost level.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    for module in model.modules():
        if id(module) in seen or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        kinds = Counter(type(child) for child in children if any(True for _ in child.children()))
        units = children if isinstance(module, nn.ModuleList) else [c for c in children if kinds[type(c)] > 1]
        found += [unit for unit in units if id(unit) not in seen]
        seen.update(id(inner) for unit in units for inner in unit.modules())
    return found


def chosen(model: nn.Module, classes: tuple[type[nn.Module], ...] | None) -> list[nn.Module]:
    """Modules of these classes, innermost first; the repeated blocks where no class is named."""
    if classes is None:
        return blocks(model)
    return [module for module in model.modules() if isinstance(module, classes) and module is not model][::-1]


def recompute(model: nn.Module, options: Options, around: AbstractContextManager[Any] | None = None) -> None:
    """Activation checkpointing as the options say. Random numbers are drawn again as in the first pass.

    Args:
        model: the user's.
        options: of the run.
        around: what stands around calls of the model, and must around the second pass.
    """
    wanted, beside = options.activation_checkpointing, around or nullcontext()
    if callable(wanted):
        wanted(blocks(model), lambda module: _second_pass(module, beside))
    elif wanted:
        for module in chosen(model, wanted if isinstance(wanted, tuple) else None):
            checkpoint(module, context_fn=functools.partial(_contexts, module, beside))


def compile_in_place(model: nn.Module, options: Options) -> None:
    """`torch.compile` block by block where there are blocks (they share one compilation), else the whole model."""
    if options.compile:
        for module in blocks(model) or [model]:
            module.compile(**_arguments(options.compile))


def transform(model: nn.Module, options: Options) -> None:
    """Both, for strategies that need nothing in between."""
    recompute(model, options)
    compile_in_place(model, options)


def _arguments(wanted: bool | str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(wanted, Mapping):
        return dict(wanted)
    return {"mode": wanted} if isinstance(wanted, str) else {}


def _contexts(
    module: nn.Module, around: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _second_pass(module, around)


@contextmanager
def _second_pass(module: nn.Module, around: AbstractContextManager[Any]) -> Iterator[None]:
    with around, _statistics_kept(module):
        yield


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """The second pass normalises as the first one did, but must not move running statistics again."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    before = [dict(layer._buffers) for layer in layers]  # noqa: SLF001 - copies stand in for the second pass
    for layer in layers:
        layer._buffers.update({name: _clone(value) for name, value in layer._buffers.items()})  # noqa: SLF001
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            layer._buffers.update(values)  # noqa: SLF001


def _clone(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()
