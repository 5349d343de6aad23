"""What may be in a batch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from worldsize.data.tree import digest, move, outline

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Graph:
    """A batch with a class of its own."""

    nodes: torch.Tensor
    name: str = "g"
    edges: list[torch.Tensor] = field(default_factory=list)


class Asked:
    """Moves itself."""

    def __init__(self) -> None:
        self.where: torch.device | None = None

    def to(self, device: torch.device) -> Asked:
        """Remember the device."""
        self.where = device
        return self


def test_every_structure_is_kept() -> None:
    """Tuples, lists, mappings and dataclasses keep their type; floats are cast, whole numbers and text are not."""
    one, whole = torch.ones(2), torch.ones(2, dtype=torch.int32)
    value = (Graph(one, edges=[one]), OrderedDict(a=[one]), MappingProxyType({"b": whole}), "text", None)
    moved = move(value, CPU, torch.float64)
    assert [type(part) for part in moved] == [type(part) for part in value]
    assert moved[0].nodes.dtype is moved[0].edges[0].dtype is moved[1]["a"][0].dtype is torch.float64
    assert moved[2]["b"].dtype is torch.int32
    assert (moved[0].name, moved[3:]) == ("g", ("text", None))
    assert value[0].nodes is one


def test_objects_with_to_move_themselves() -> None:
    """An object with a method `to` is asked."""
    assert move([Asked()], CPU)[0].where == CPU


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (np.ones(3), np.ones(3, dtype=np.float32)),
        (["ab"], ["a", "b"]),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
        (Graph(torch.ones(2)), Graph(torch.zeros(2))),
    ],
)
def test_digests_tell_values_apart(one: Any, other: Any) -> None:
    """Content, type, shape and structure are in the digest."""
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_outlines_are_short() -> None:
    """An outline has types and shapes."""
    sample = {"x": torch.zeros(3, 2), "y": (1, np.zeros(2, dtype=np.int64))}
    assert outline(sample) == "{x: float32[3, 2], y: (int, numpy int64[2])}"
