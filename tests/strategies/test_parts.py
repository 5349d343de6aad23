from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worldsize.errors import ConfigError
from worldsize.strategies import registry
from worldsize.strategies.base import Options, brief
from worldsize.strategies.outputs import mapped, tensors
from worldsize.strategies.single import Single
from worldsize.strategies.transform import blocks, chosen


def _layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_blocks_are_repeated_units() -> None:
    """Entries of a list, or of a sequence in which a class with layers repeats; nested ones count once."""
    lists = nn.ModuleList([nn.Sequential(nn.ModuleList([_layer(), _layer()])), _layer(), nn.ReLU()])
    sequence = nn.Sequential(nn.Linear(2, 2), _layer(), _layer())
    assert blocks(lists) == [lists[0], lists[1]]
    assert blocks(sequence) == [sequence[1], sequence[2]]
    assert blocks(nn.Linear(2, 2)) == []


def test_chosen_classes_come_innermost_first() -> None:
    """An inner unit must be sharded before the one around it, and the model itself is never one of them."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert chosen(model, (nn.Sequential, nn.Linear)) == [model[0][0], model[0]]  # type: ignore[index]


@pytest.mark.parametrize("values", [{"wrong": 1}, {"init": "nowhere"}, {"unused_parameters": "perhaps"}])
def test_options_are_checked(values: dict[str, Any]) -> None:
    """An unknown option or value is an error that names the known ones."""
    with pytest.raises(ConfigError, match=r"[Cc]hoose"):
        Options.of(values)


def test_names_are_cut_short() -> None:
    """The first five names, and a count of the rest."""
    assert brief(["a", "b"]) == "a, b"
    assert brief(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_strategies_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, and those of other packages through an entry point; another name is an error with all of them."""
    point = EntryPoint("mine", "worldsize.strategies.single:Single", "worldsize.strategies")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "worldsize.strategies" else [])
    assert registry.find("single") is registry.find("mine") is Single
    with pytest.raises(ConfigError, match=r"single, ddp, fsdp, .*, zero3, mine"):
        registry.find("dpp")
    assert (registry.default(1), registry.default(2)) == ("single", "ddp")


@dataclass(frozen=True)
class Record:
    """Holds a tensor."""

    value: Tensor
    name: str = "r"


def test_tensors_are_found_and_changed_inside_of_anything() -> None:
    """Dicts, lists, tuples and records, nested; everything else stays, and the original too."""
    one = torch.ones(())
    output = {"a": [one, 3], "b": Record(one * 2), "c": (None, {"d": Record(one * 3)})}
    assert [float(value) for value in tensors(output)] == [1.0, 2.0, 3.0]
    changed = mapped(lambda value: value * 10, output)
    assert [float(value) for value in tensors(changed)] == [10.0, 20.0, 30.0]
    assert changed["b"].name == "r"
    assert float(output["b"].value) == 2.0  # type: ignore[attr-defined]
