"""Room: where a model is cut into stages, and what is left of it on a rank. Knows modules and names; no ranks' traffic.

A chain is a model whose forward passes its input through its modules one after another and does nothing else: an
`nn.Sequential`, or any class that is written so (its lists and sequences of modules count as their entries). Whether a
class is, is seen by `shapes` before the first step. Every other model says itself what its stages are: `pipeline_stages(n)`.
"""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from worldsize.errors import ConfigError, LayoutError
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed, reseeded
from worldsize.strategies.base import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from worldsize.strategies.base import Options

Part = tuple[str, nn.Module]
"""A module and its path in the model."""
_COMPILED = "_torchdynamo_orig_callable"
"""Functions that `torch.compile` returns have it."""


@runtime_checkable
class Staged(Protocol):
    """A model that says what its stages are."""

    def pipeline_stages(self, n: int) -> Sequence[nn.Module]:
        """Its stages: modules that hold the model's own. A tuple that one returns is the next one's arguments."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in stages.

    Attributes:
        stages: the parts of each.
        own: whether the model said so itself; else they are a chain.
        lists: paths of the model's lists of modules; its other containers are sequences.
        row: whether the model itself is a sequence.
    """

    stages: list[list[Part]]
    own: bool = False
    lists: frozenset[str] = frozenset()
    row: bool = False

    @property
    def parts(self) -> list[Part]:
        """All parts, in order."""
        return list(itertools.chain(*self.stages))

    def stage(self, index: int) -> Stage:
        """One stage as a module."""
        return (Row if self.row else Stage)(self, self.stages[index])


class Stage(nn.Module):
    """One stage as a module: names are those of the bare model. Each part draws from random numbers of its own path.

    Containers are there for the names, and so that what looks for repeated blocks finds them: they are never called.

    Attributes:
        seed: of the micro-batch that passes next.
        idle: paths of parts that the model's forward leaves out.
    """

    def __init__(self, found: Cut, parts: Sequence[Part]) -> None:
        super().__init__()
        for path, part in parts:
            inside, _, name = path.rpartition(".")
            if inside and inside not in self._modules:
                self._modules[inside] = nn.ModuleList() if inside in found.lists else nn.Sequential()
            into = self.get_submodule(inside)
            into._modules[name] = part  # noqa: SLF001 - lists refuse numbers that do not begin at 0
        # Hidden in a tuple: the names are those above.
        self._parts, self._unpacks = tuple(parts), found.own
        self.seed, self.idle = 0, frozenset[str]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Through all parts. The first gets the arguments as they are."""
        device = next(self.parameters()).device
        with reseeded(0, device):
            for path, part in self._parts:
                if path in self.idle:
                    continue
                reseed(key(self.seed, path), device)
                value = part(*args, **kwargs)
                args, kwargs = value if self._unpacks and isinstance(value, tuple) else (value,), {}
        return value


class Row(Stage, nn.Sequential):
    """A stage of a sequence: its repeated blocks are its own entries."""


def cut(model: nn.Module, stages: int, options: Options, costs: Mapping[str, float] | None = None) -> Cut:
    """Cut a model into so many stages.

    Args:
        model: as it was built, with or without memory.
        stages: how many.
        options: `split` says where stages begin, where the balance shall not.
        costs: what each part of the chain costs, by path; the number of its parameters where None.

    Raises:
        LayoutError: the model cannot be cut so, with the names or numbers.
        ConfigError: `split` names what is not there.
    """
    if isinstance(model, Staged):
        found = Cut([[(f"stage{index}", each)] for index, each in enumerate(model.pipeline_stages(stages))], own=True)
        if len(found.stages) != stages:
            raise LayoutError(
                "pipeline_stages gave another number of stages", found=f"{len(found.stages)} for {stages}"
            )
    else:
        parts = chain(model)
        sizes = [(costs or {}).get(path, _numbers(part)) for path, part in parts]
        starts = _starts(parts, options.split, stages) if options.split else _balance(parts, sizes, stages)
        edges = [*starts, len(parts)]
        lists = frozenset(path for path, child in model.named_children() if isinstance(child, nn.ModuleList))
        groups = [parts[start:stop] for start, stop in itertools.pairwise(edges)]
        found = Cut(groups, lists=lists, row=_is_list(model))
    _check(model, found)
    return found


def chain(model: nn.Module) -> list[Part]:
    """The modules that an input passes one after another, if the model is a chain."""
    found: list[Part] = []
    for name, child in model.named_children():
        inner = _is_list(child) and not _is_list(model)
        found += [(f"{name}.{each}", part) for each, part in child.named_children()] if inner else [(name, child)]
    return found


def _is_list(module: nn.Module) -> bool:
    """Whether it is no more than its entries."""
    hooked = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return not hooked and (plain or isinstance(module, nn.ModuleList))


def _numbers(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def _starts(parts: Sequence[Part], split: Sequence[str], stages: int) -> list[int]:
    if len(split) != stages - 1:
        raise ConfigError(
            "split names where every stage but the first begins",
            found=f"{len(split)} names for {stages} stages",
            do=f"give {stages - 1}",
        )
    found = [0]
    for name in split:
        at = [index for index, (path, _) in enumerate(parts) if path == name or path.startswith(f"{name}.")]
        if not at or at[0] <= found[-1]:
            known = brief([path for path, _ in parts])
            raise ConfigError(
                "split must name modules of the chain in their order", found=repr(name), do=f"choose from {known}"
            )
        found.append(at[0])
    return found


def _balance(parts: Sequence[Part], sizes: Sequence[float], stages: int) -> list[int]:
    """Where stages begin so that the most expensive is as cheap as can be. None is without parameters."""
    heads = [index for index, (_, part) in enumerate(parts) if _numbers(part)]
    if len(heads) < stages:
        raise LayoutError(
            "the model has fewer modules with parameters than there are stages",
            found=f"{len(heads)} modules in a row, {stages} stages",
            do="use fewer stages (pp=, or stages= where a rank holds several), or give the model pipeline_stages(n)",
        )
    heads[0] = 0  # what comes before the first parameter goes with it
    edges = [*heads, len(parts)]
    costs = [sum(sizes[start:stop]) for start, stop in itertools.pairwise(edges)]
    return [heads[start] for start in _partition(costs, stages)]


def _partition(costs: Sequence[float], groups: int) -> list[int]:
    """Cut a row into groups with the smallest possible largest sum. Returns where each begins."""
    sums = [0.0, *itertools.accumulate(costs)]
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * len(costs)]
    for _ in range(groups):
        row = [
            min((max(best[-1][start][0], sums[stop] - sums[start]), start) for start in range(stop))
            for stop in range(1, len(costs) + 1)
        ]
        best.append([(math.inf, 0), *row])
    starts, stop = [], len(costs)
    for group in range(groups, 0, -1):
        stop = best[group][stop][1]
        starts.append(stop)
    return starts[::-1]


def _check(model: nn.Module, found: Cut) -> None:
    """Every parameter belongs to a stage, and every forward to its module: copies and ranks have it in other places."""
    bound = [
        path
        for path, part in model.named_modules()
        if hasattr(vars(part).get("forward"), _COMPILED)
        and not hasattr(part, "_orig_mod")  # torch.compile(module) has both
    ]
    if bound:
        raise LayoutError(
            "a module's forward is compiled without the module: in a pipeline it would belong to another copy",
            found=brief(bound),
            do="module.compile() in place of module.forward = torch.compile(module.forward)",
        )
    names = {value: name for name, value in model.named_parameters()}
    holders: dict[nn.Parameter, set[int]] = {}
    for index, stage in enumerate(found.stages):
        for value in (value for _, part in stage for value in part.parameters()):
            holders.setdefault(value, set()).add(index)
        if not any(True for _, part in stage for _ in part.parameters()):
            raise LayoutError(
                "a stage has no parameters", found=f"stage {index}: {brief([path for path, _ in stage])}"
            )
    foreign = [f"{tuple(value.shape)}" for value in holders if value not in names]
    if foreign:
        raise LayoutError("pipeline_stages holds parameters that the model does not have", found=brief(foreign))
    left = [name for value, name in names.items() if value not in holders]
    if left:
        raise LayoutError(
            "parameters are outside of the modules that a pipeline is cut from",
            found=brief(left),
            do="put them into one of the modules, or give the model pipeline_stages(n)",
        )


def keep_only(model: nn.Module, found: Cut, stages: Sequence[int]) -> None:
    """Take the parameters and buffers of other stages out of the model: no memory, no names."""
    held = [{value for _, part in stage for value in (*part.parameters(), *part.buffers())} for stage in found.stages]
    mine = {value for stage in stages for value in held[stage]}
    away = {value for stage in held for value in stage} - mine
    for module in model.modules():
        for slots in (module._parameters, module._buffers):  # noqa: SLF001 - there is no public way to leave a name empty
            slots.update({name: None for name, value in slots.items() if value is not None and value in away})


@contextmanager
def followed(model: nn.Module, stages: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters that a strategy puts in the place of others in the stages, within this block, appear in the model too."""
    slots = [
        (module, name, value)
        for stage in stages
        for module in stage.modules()
        for name, value in module._parameters.items()  # noqa: SLF001 - shared ones too, which the public lists leave out
        if value is not None
    ]
    yield
    new = {value: module._parameters[name] for module, name, value in slots}  # noqa: SLF001
    for module in model.modules():
        held = module._parameters  # noqa: SLF001
        held.update({name: new[value] for name, value in held.items() if value is not None and value in new})
