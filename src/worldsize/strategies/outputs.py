"""Room: finding and changing the tensors inside whatever a model returns: dicts, tuples, dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def tensors(value: Any) -> list[Tensor]:
    """All tensors inside, in order."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif _is_record(leaf):
            found += tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with every tensor changed."""

    def each(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        return _record(change, leaf) if _is_record(leaf) else leaf

    return tree_map(each, value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _record(change: Callable[[Tensor], Tensor], record: Any) -> Any:
    new = copy.copy(record)
    for field in dataclasses.fields(record):
        # Frozen records refuse assignment, and fields need not be arguments of the constructor.
        object.__setattr__(new, field.name, mapped(change, getattr(record, field.name)))
    return new
