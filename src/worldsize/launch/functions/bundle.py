"""Room: a call as a pickle: the function by value where it must be, and one line about what cannot be sent."""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from worldsize.errors import ConfigError
from worldsize.launch.spawned import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEEPEST = 12


class Wrapped:
    """A function that its module knows as this object: it travels by name where it can be imported, else by value."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        functools.update_wrapper(self, function)  # type: ignore[arg-type] # subclasses can be called
        self.function = function

    def __reduce__(self) -> str | tuple[Any, ...]:
        module, name = self.function.__module__, self.function.__qualname__
        found: Any = sys.modules.get(module) if module != "__main__" else None
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (type(self), (self.function,))


class NotSentError(ConfigError, TypeError):
    """A function, or what it uses, cannot be pickled. Nothing was submitted."""


def call(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
    """The pickle of (function, (args, named)).

    Raises:
        NotSentError: it cannot be made; the error names the global, the variable or the argument, and what in it.
    """
    try:
        return pack(function, (args, dict(named)))
    except Exception as error:  # noqa: BLE001 - what is pickled is the user's, and may raise anything
        plain = function.function if isinstance(function, Wrapped) else function
        parts = [*_inside(plain), *((f"argument {at + 1}", each) for at, each in enumerate(args))]
        parts += [(f"argument {name}", each) for name, each in named.items()]
        path, culprit = _culprit(parts, _DEEPEST) or (f"function {plain.__name__}", plain)
        kind = type(culprit)
        raise NotSentError(
            f"{plain.__name__} cannot be sent to a job: {path} is a {kind.__module__}.{kind.__qualname__}",
            found=f"{type(error).__name__}: {error}",
            do="make it inside the function, or hand over what it is made of",
        ) from None


def _culprit(parts: list[tuple[str, Any]], depth: int) -> tuple[str, Any] | None:
    """The first part that cannot be pickled, as deep inside as it can be named."""
    for path, part in parts:
        if not _sendable(part):
            inner = [(_joined(path, name), each) for name, each in _inside(part)] if depth else []
            return _culprit(inner, depth - 1) or (path, part)
    return None


def _sendable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What its pickle would hold, with the names that people know it by."""
    value = value.function if isinstance(value, Wrapped) else value
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{at}]", each) for at, each in enumerate(value))
    elif not isinstance(value, ModuleType):
        yield from ((f".{name}", each) for name, each in getattr(value, "__dict__", {}).items())


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield f"global {name}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name}", cell.cell_contents
        except ValueError:
            continue
    yield from ((f"a default of {function.__name__}", each) for each in function.__defaults__ or ())
    yield from ((f"the default of {name}", each) for name, each in (function.__kwdefaults__ or {}).items())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _joined(path: str, name: str) -> str:
    return f"{path}{name}" if name[0] in ".[" else f"{name} of {path.removeprefix('global ')}"
