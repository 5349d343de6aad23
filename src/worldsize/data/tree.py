"""Room: what a batch may be made of: tensors in tuples, lists, mappings, dataclasses, or objects with their own `to`.

Knows how to move, pin, describe and digest such a value; never where it came from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def move(value: Any, device: torch.device, floats: torch.dtype | None = None) -> Any:
    """The value with every tensor on `device`, floating-point ones as `floats` if given.

    Copies from pinned memory do not block. An object with a method `to` is asked to move itself, and keeps its types.
    """

    def tensor(leaf: Tensor) -> Tensor:
        dtype = floats if floats is not None and leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=device, dtype=dtype, non_blocking=True)

    return _rebuilt(value, "to", tensor, lambda leaf: leaf.to(device))


def pinned(value: Any) -> Any:
    """The value with every tensor of the host in page-locked memory; those on a device already stay there."""

    def tensor(leaf: Tensor) -> Tensor:
        return leaf.pin_memory() if leaf.device.type == "cpu" else leaf

    return _rebuilt(value, "pin_memory", tensor, lambda leaf: leaf.pin_memory())


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value with every part of that kind changed; objects that would move themselves are left as they are."""
    return _rebuilt(value, "to", change, lambda leaf: leaf, kind)


def digest(value: Any) -> str:
    """32 hexadecimal digits over the content: types, shapes, numbers and text; equal in every process."""
    hasher = blake2b(digest_size=16)
    for chunk in _chunks(value):
        hasher.update(len(chunk).to_bytes(8, "little") + chunk)
    return hasher.hexdigest()


def size(value: Any) -> int:
    """Bytes of content, roughly: of tensors, arrays, images, text and numbers inside."""
    return sum(map(len, _chunks(value)))


def outline(value: Any) -> str:
    """Types and shapes in one line, such as `(float32[3, 32, 32], int)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {outline(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(outline, value)) + ")"
    return type(value).__name__


def _rebuilt(
    value: Any, verb: str, leaf: Callable[[Any], Any], other: Callable[[Any], Any], kind: type = Tensor
) -> Any:
    """A copy of the structure with `leaf` applied to parts of `kind` and `other` to objects that have the method `verb`."""

    def inner(part: Any) -> Any:
        if isinstance(part, kind):
            return leaf(part)
        if not isinstance(part, _PLAIN) and callable(getattr(part, verb, None)):
            return other(part)
        if isinstance(part, Mapping):
            return _mapping(part, inner)
        if isinstance(part, tuple | list):
            parts = [inner(item) for item in part]
            return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
        if is_dataclass(part) and not isinstance(part, type):
            return _record(part, inner)
        return part

    return inner(value)


def _mapping(value: Mapping[Any, Any], inner: Callable[[Any], Any]) -> Any:
    parts = {name: inner(part) for name, part in value.items()}
    if type(value) is dict:
        return parts
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        clone.update(parts)
        return clone
    return type(value)(parts)  # type: ignore[call-arg]


def _record(value: Any, inner: Callable[[Any], Any]) -> Any:
    clone = copy.copy(value)
    for field in fields(value):
        object.__setattr__(clone, field.name, inner(getattr(value, field.name)))
    return clone


def _chunks(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, Tensor):
        flat = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        yield outline(value).encode()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, _PLAIN):
        yield ascii(value).encode()
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield ascii(name).encode()
            yield from _chunks(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _chunks(part)
    elif callable(getattr(value, "tobytes", None)):
        yield f"{outline(value)}{getattr(value, 'size', '')}".encode()
        yield value.tobytes()
    else:
        for name, part in sorted(getattr(value, "__dict__", {}).items()):
            yield name.encode()
            yield from _chunks(part)
