"""Room: changes to a model that keep its names: activation checkpointing and compilation, in place.

Order: activation checkpointing first, so that what is compiled contains the recomputation; then compile; a strategy
that shards does so between the two, so that each unit is gathered outside its compiled region.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed._composable import checkpoint

if TYPE_CHECKING:
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


def recompute(model: nn.Module, options: Options) -> None:
    """Activation checkpointing as the options say."""
    wanted = options.activation_checkpointing
    if wanted:
        for module in chosen(model, None if wanted is True else wanted):
            checkpoint(module)


def compile_in_place(model: nn.Module, options: Options) -> None:
    """`torch.compile` block by block where there are blocks (they share one compilation), else the whole model."""
    if options.compile:
        mode = options.compile if isinstance(options.compile, str) else None
        for module in blocks(model) or [model]:
            module.compile(mode=mode)


def transform(model: nn.Module, options: Options) -> None:
    """Both, for strategies that need nothing in between."""
    recompute(model, options)
    compile_in_place(model, options)
