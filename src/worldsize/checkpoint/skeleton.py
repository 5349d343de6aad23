"""Room: a state that was split into tensors and plain values, put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def unpack(skeleton: Any, tensor: Callable[[str], Any]) -> Any:
    """Put a state together again that was split into tensors and plain values.

    Args:
        skeleton: what train.json holds of it: `{"pairs": ...}`, `{"list": ...}`, `{"tuple": ...}`, `{"tensor": ...}`.
        tensor: gives the tensor of a name.
    """
    if not isinstance(skeleton, dict):
        return skeleton
    (kind, inside), *_ = skeleton.items()
    if kind == "tensor":
        return tensor(inside[0])
    if kind == "pairs":
        return {key: unpack(value, tensor) for key, value in inside}
    items = [unpack(value, tensor) for value in inside]
    return tuple(items) if kind == "tuple" else items
