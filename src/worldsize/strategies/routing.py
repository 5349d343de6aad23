"""Room: the user's model stays the user's, and every way into it goes through the strategy.

A wrapper such as DistributedDataParallel sees only calls of itself: `model.encode(x)` on the bare model would leave
ranks with different gradients, silently. Here the model gets a subclass of its own class in which the call, `forward`,
and every public method that is given tensors, enter through the strategy first. Names, attributes and `isinstance` are kept.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_any

from worldsize.strategies.outputs import mapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from worldsize.strategies.precision import Precision


class Entry(Protocol):
    """The strategy's door: calls `method(*args, **kwargs)` of the model with its collectives around it."""

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the method returns."""
        ...


class Door:
    """One model's door. Only the outermost call goes through; inner ones are already inside."""

    def __init__(self, entry: Entry | None, precision: Precision, device: torch.device) -> None:
        self._entry = entry
        self._dtype = precision.autocast
        # One object for all calls: making one asks the driver what it supports. Only the outermost call enters it.
        self._autocast = torch.autocast(device.type, self._dtype) if self._dtype is not None else None
        self.inside = False

    def call(self, original: Callable[..., Any], method: str, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run one method of the model through the door."""
        self.inside = True
        inner = functools.partial(self._entry, method) if self._entry else functools.partial(original, model)
        try:
            if self._autocast is None:
                return inner(*args, **kwargs)
            with self._autocast:
                result = inner(*args, **kwargs)
            return self._widen(result) if isinstance(result, torch.Tensor) else mapped(self._widen, result)
        finally:
            self.inside = False

    def _widen(self, value: Tensor) -> Tensor:
        # Losses are computed outside: in 8 bits of mantissa a mean over many tokens would lose the small ones.
        return value.float() if value.dtype is self._dtype else value


def route(model: nn.Module, entry: Entry | None, precision: Precision, device: torch.device) -> nn.Module:
    """Give the model its door. Without entry and autocast there is nothing to pass: the model is returned as it is."""
    if entry is None and precision.autocast is None:
        return model
    door, kind = Door(entry, precision, device), type(model)
    members: dict[str, Any] = {name: _method(door, model, kind, name) for name in methods(kind)}
    for name in ("__call__", "forward"):
        members[name] = _method(door, model, kind, name, always=True)
    members["__module__"], members["__qualname__"] = kind.__module__, kind.__qualname__
    model.__class__ = type(kind.__name__, (kind,), members)
    return model


def methods(kind: type[nn.Module]) -> list[str]:
    """Public methods that the user's classes define: not torch's, not properties, not static."""
    own = [base for base in kind.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")]
    names = {
        name
        for base in own
        for name, member in vars(base).items()
        if inspect.isfunction(member) and not name.startswith("_") and not hasattr(nn.Module, name)
    }
    return sorted(names)


def _method(
    door: Door, model: nn.Module, kind: type[nn.Module], name: str, *, always: bool = False
) -> Callable[..., Any]:
    original = getattr(kind, name)

    @functools.wraps(original)
    def through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A copy of the model carries this class too, but is the user's own business: it stays outside.
        if self is not model or door.inside or not (always or tree_any(_tensor, (args, kwargs))):
            return original(self, *args, **kwargs)
        return door.call(original, name, self, *args, **kwargs)

    return through


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
