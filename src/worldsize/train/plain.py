"""Room: splitting any state into tensors by name and a skeleton that JSON can hold, and putting it together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_MARK = "tensor:"


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
        shape, dtype = "x".join(map(str, value.shape)), str(value.dtype).removeprefix("torch.")
        return f"{_MARK}{path}:{shape}:{dtype}:{value.device.type}"
    if isinstance(value, dict):
        # JSON would turn the key 3 into "3": pairs keep it a number.
        return {"pairs": [[key, split(inner, f"{path}/{key}", tensors)] for key, inner in value.items()]}
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
    found: dict[str, Tensor] = {}
    for mark in _marks(skeleton):
        path, shape, dtype, device = mark.removeprefix(_MARK).rsplit(":", 3)
        size = [int(number) for number in shape.split("x") if number]
        found[path] = torch.empty(size, dtype=getattr(torch, dtype), device="cpu" if device == "cpu" else like)
    return found


def join(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `split`."""
    if isinstance(skeleton, str) and skeleton.startswith(_MARK):
        return tensors[skeleton.removeprefix(_MARK).rsplit(":", 3)[0]]
    if isinstance(skeleton, dict):
        if "pairs" in skeleton:
            return {key: join(inner, tensors) for key, inner in skeleton["pairs"]}
        items = [join(inner, tensors) for inner in next(iter(skeleton.values()))]
        return tuple(items) if "tuple" in skeleton else items
    return skeleton


def _marks(skeleton: Any) -> list[str]:
    if isinstance(skeleton, str):
        return [skeleton] if skeleton.startswith(_MARK) else []
    if isinstance(skeleton, dict):
        inner: list[Any] = (
            [value for _, value in skeleton["pairs"]] if "pairs" in skeleton else next(iter(skeleton.values()))
        )
        return [mark for value in inner for mark in _marks(value)]
    return []
