"""Room: splitting any state into tensors by name and a skeleton that JSON can hold, and putting it together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

from worldsize.checkpoint.skeleton import unpack
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from worldsize.runtime.stretch import Stretch


def split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Take the tensors out of nested dicts, lists and tuples.

    Args:
        value: tensors, None, bool, int, float, str, and dicts, lists and tuples of these.
        path: the name that the tensors' names begin with.
        tensors: receives them.

    Returns:
        the same structure in plain types.

    Raises:
        ConfigError: something in it could not be read back without running foreign code.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": [path, list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]}
    if isinstance(value, dict):
        # JSON would turn the key 3 into "3": pairs keep it a number.
        return {"pairs": [[key, split(inner, f"{path}/{_word(key, path)}", tensors)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        items = [split(inner, f"{path}/{index}", tensors) for index, inner in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()  # a numpy number
    raise ConfigError(
        f"{path}: a {type(value).__name__} cannot be saved in a way that is safe to load",
        do="keep tensors, numbers, texts, and lists or dicts of these",
    )


def empty(skeleton: Any, like: Any = None) -> dict[str, Tensor]:
    """Empty tensors for every name in the skeleton, on the device type that they were on where it is here.

    Args:
        skeleton: from `split`.
        like: a device for those that were not on the host.
    """
    return {
        path: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if device == "cpu" else like)
        for path, shape, dtype, device in _tensors(skeleton)
    }


def join(skeleton: Any, tensors: Mapping[str, Tensor | Stretch]) -> Any:
    """Undo `split`."""
    return unpack(skeleton, tensors.__getitem__)


def _tensors(skeleton: Any) -> Iterator[tuple[str, list[int], str, str]]:
    if not isinstance(skeleton, dict):
        return
    if "tensor" in skeleton:
        path, shape, dtype, device = skeleton["tensor"]
        yield path, shape, dtype, device
        return
    (kind, items), *_ = skeleton.items()
    for inner in items:
        yield from _tensors(inner[1] if kind == "pairs" else inner)


def _word(key: Any, path: str) -> str:
    """A key as one word of a tensor's name: different keys give different words."""
    if isinstance(key, str):
        return quote(key, safe=" :!$&'()*+,;=@[]")
    if key is None or isinstance(key, bool | int | float):
        return f"#{key!r}"
    raise ConfigError(
        f"{path}: a key of type {type(key).__name__} cannot be saved", do="use texts or numbers as keys"
    )
