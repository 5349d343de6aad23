"""Room: what passes between stages: structures, shapes and kinds, found without values and without other ranks.

A copy of the model without memory (fake tensors) is kept on every rank. For inputs of a new shape its forward runs once
through that copy, and what goes in and out of the parts is noted. It also shows whether the model is a chain.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from worldsize.errors import LayoutError
from worldsize.runtime.seeds import reseeded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from worldsize.strategies.pipeline.chain import Cut, Part
    from worldsize.strategies.precision import Precision

_SAY = "give the model pipeline_stages(n): its stages as modules, each of which takes what the one before returns"


@dataclass(frozen=True, slots=True)
class Fact:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    def empty(self, device: torch.device) -> Tensor:
        """Room for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Passed:
    """What one stage gives to the next, or the last one to the program: tensors in some structure."""

    facts: tuple[Fact, ...]
    spec: TreeSpec

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The structure around these tensors."""
        return tree_unflatten(list(tensors), self.spec)

    def leaves(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What a stage gave, as the roots that the next one's graph grows from."""
        return [value.requires_grad_(fact.trained) for value, fact in zip(values, self.facts, strict=True)]


@dataclass(frozen=True, slots=True)
class Trace:
    """What passes for inputs of one shape.

    Attributes:
        passed: what each stage gives.
        idle: paths of parts that the forward does not call.
    """

    passed: tuple[Passed, ...]
    idle: frozenset[str]


class Shapes:
    """Traces of one model, by what it is called with.

    Args:
        model: whole, with or without memory.
        cut: where it is cut.
        device: where it computes.
        precision: what it computes in.
    """

    def __init__(self, model: nn.Module, cut: Cut, device: torch.device, precision: Precision) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._precision = device, precision
        # One copy of both, so that the parts are those of the copied model.
        self._model, self._cut = copy.deepcopy(
            (model, cut), {id(value): self._without(value) for value in _tensors(model)}
        )
        self._known: dict[Any, Trace] = {}

    def of(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """What passes in a call of the model with these arguments.

        Raises:
            LayoutError: the model is no chain, what passes is not made of tensors, or its shapes depend on values.
        """
        key = model.training, signature((args, kwargs))
        if key not in self._known:
            for module, twin in zip(model.modules(), self._model.modules(), strict=True):
                twin.training = module.training
            # Hidden from a program that compiles around its call of the model.
            self._known[key] = torch.compiler.disable(self._trace)(args, kwargs)
        return self._known[key]

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        low = self._precision.autocast
        cast = (
            torch.autocast(self._device.type, low)
            if low is not None
            else torch.autocast(self._device.type, enabled=False)
        )
        try:
            with torch.enable_grad(), reseeded(0), _uncompiled(), self._fake, cast:
                args, kwargs = tree_map(self._faked, (args, kwargs))
                return self._stages(args, kwargs) if self._cut.own else self._chain(args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise LayoutError(
                "a pipeline must know the shapes between its stages beforehand, and this model's depend on values",
                found=str(error).splitlines()[0],
                do="use fsdp or tp for this model",
            ) from None

    def _stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        found: list[Passed] = []
        value: Any = None
        for path, stage in self._cut.parts:
            value = stage(*args, **kwargs)
            args, kwargs = value if isinstance(value, tuple) else (value,), {}
            found.append(self._passed(path, value))
        return Trace(tuple(found), frozenset())

    def _chain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        watch = _Watch(self._cut.parts)
        output = watch.run(self._model, args, kwargs)
        idle = frozenset(path for path, _ in self._cut.parts if path not in watch.given)
        ends = [[path for path, _ in stage if path not in idle] for stage in self._cut.stages]
        empty = [index for index, paths in enumerate(ends) if not paths]
        if empty or watch.given[watch.last] is not output:
            after = (
                f"stage {empty[0]} calls nothing" if empty else f"after {watch.last!r} its forward computes something"
            )
            raise LayoutError("a pipeline cannot cut this model: it is no chain", found=after, do=_SAY)
        return Trace(tuple(self._passed(paths[-1], watch.given[paths[-1]]) for paths in ends), idle)

    def _passed(self, path: str, value: Any) -> Passed:
        leaves, spec = tree_flatten(value)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)}))
            raise LayoutError("only tensors can pass between stages", found=f"{path!r} returns {kinds}", do=_SAY)
        return Passed(tuple(self._fact(leaf) for leaf in leaves), spec)

    def _fact(self, leaf: Tensor) -> Fact:
        # What a stage computed in few bits leaves it in float32.
        dtype = torch.float32 if leaf.dtype is self._precision.autocast else leaf.dtype
        return Fact(tuple(leaf.shape), dtype, leaf.requires_grad)

    def _without(self, value: Tensor) -> Tensor:
        dtype = self._precision.parameters if value.is_floating_point() else value.dtype
        with self._fake:
            data = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=self._device)
            return nn.Parameter(data, value.requires_grad) if isinstance(value, nn.Parameter) else data

    def _faked(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """What a program compiled itself would hand the addresses of fake tensors to its kernels. Holds for all threads."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on purpose, here
        yield


class _Watch:
    """Follows a model's input through the parts of a chain."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self.given: dict[str, Any] = {}
        self.last = ""

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns. Raises LayoutError where it is no chain."""
        hooks = []
        for path, part in self._parts:
            hooks.append(part.register_forward_pre_hook(self._before(path, (args, kwargs)), with_kwargs=True))
            hooks.append(part.register_forward_hook(self._after(path)))
        try:
            return model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, path: str, first: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        places = {name: index for index, (name, _) in enumerate(self._parts)}

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            wanted = ((self.given[self.last],), {}) if self.last else first
            if self.last and places[path] <= places[self.last]:
                raise _no_chain(f"its forward calls {path!r} after {self.last!r}")
            same = len(args) == len(wanted[0]) and all(a is b for a, b in zip(args, wanted[0], strict=True))
            if (
                not same
                or kwargs.keys() != wanted[1].keys()
                or any(kwargs[name] is not wanted[1][name] for name in kwargs)
            ):
                where = f"between {self.last!r} and {path!r}" if self.last else f"before {path!r}"
                raise _no_chain(f"{where} its forward computes something")

        return before

    def _after(self, path: str) -> Any:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self.given[path], self.last = output, path

        return after


def _no_chain(found: str) -> LayoutError:
    return LayoutError("a pipeline cannot cut this model: it is no chain", found=found, do=_SAY)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def signature(value: Any) -> Any:
    """What shapes depend on: structure, shapes and dtypes; numbers by their value."""
    leaves, spec = tree_flatten(value)
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )
