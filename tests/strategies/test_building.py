# ruff: noqa: D102 - reset_parameters is torch's word
from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.fitting import attempt, opened, placed
from tests.strategies.models import WIDTH, Blocks, ForMeta, Rotary
from worldsize.strategies.base import full

if TYPE_CHECKING:
    from worldsize.testing.ranks import RankPool

pytestmark = pytest.mark.usefixtures("here")


def _said(build: Any) -> str:
    strategy = opened("single")
    return attempt(lambda: placed(strategy, build, init="meta"))


def test_the_values_are_those_of_reset_parameters() -> None:
    """Ties, tables, attention and norms come out filled, each as its own module says."""
    model = placed(opened("single"), ForMeta, init="meta")
    assert isinstance(model, ForMeta)
    assert model.head.weight is model.inp.weight
    assert model.rotary.table.tolist() == torch.linspace(0, 2, WIDTH).double().tolist()
    assert not any(value.isnan().any() for value in model.state_dict().values())
    block = model.blocks[0]
    assert isinstance(block, nn.TransformerEncoderLayer)
    assert block.self_attn.out_proj.bias.count_nonzero() == 0
    assert all(value.dtype is torch.float64 for value in model.parameters())


def test_blocks_of_one_kind_differ() -> None:
    """Random keys are made of paths: two blocks do not get the same numbers."""
    model = placed(opened("single"), Blocks, init="meta")
    first, second = (block.a.weight for block in model.blocks.children())  # type: ignore[union-attr]
    assert not torch.equal(first, second)  # type: ignore[arg-type]


class Owner(nn.Module):
    """An embedding that takes the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.inp.weight = self.head.weight


def test_a_shared_weight_is_initialised_by_the_module_that_gave_it() -> None:
    """Of two modules that share a weight, the one whose values the constructor kept fills it."""
    model = placed(opened("single"), Owner, init="meta")
    assert isinstance(model, Owner)
    assert model.inp.weight is model.head.weight
    assert model.head.weight.abs().max() <= WIDTH**-0.5


class Own(nn.Module):
    """Parameters without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(3))


class Table(nn.Linear):
    """A buffer that only the constructor computes."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


class Counted(nn.Linear):
    """The same with whole numbers."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("numbers", torch.arange(3))


class Rewritten(nn.Module):
    """Initialises its layers once more after they did it themselves, in the common way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(3, 3)])
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)


class Attribute(Rotary):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = torch.arange(3.0)


_THERE = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Own, ["no reset_parameters", "inner.scale"]),
        (Table, ["leaves something unset", "Table: angles"]),
        (Counted, ["leaves something unset", "Counted: numbers"]),
        (Rewritten, ["outside of reset_parameters", "layers.0.weight, layers.1.weight"]),
        (Attribute, ["neither parameters nor buffers", "angles"]),
        (lambda: nn.LazyLinear(3), ["lazy", "weight"]),
        (functools.partial(copy.copy, _THERE), ["its class or a function"]),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(build: Any, words: list[str]) -> None:
    """No value is ever left to chance: modules, buffers and attributes that nothing fills are named."""
    said = _said(build)
    assert all(word in said for word in words), said


class Looking(nn.Linear):
    """Notes, while it is filled, how many whole weights lie in memory."""

    def __init__(self, model: Units) -> None:
        self.look = model.look
        super().__init__(4, 4)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.look()


class Units(nn.Module):
    """Four blocks of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.layers = nn.ModuleList([Looking(self) for _ in range(4)])

    def look(self) -> None:
        """Count now."""
        values = [value for value in self.parameters() if not value.is_meta]
        self.most = max(self.most, sum(type(value.data) is Tensor for value in values))


def _meta_on_ranks() -> tuple[int, dict[str, Any]]:
    units = placed(opened("fsdp"), Units, init="meta")
    assert isinstance(units, Units)
    model = placed(opened("fsdp"), ForMeta, init="meta")
    return units.most, {name: full(value).tolist() for name, value in model.state_dict().items()}


def test_fsdp_holds_one_unit_whole(two: RankPool) -> None:
    """While a sharded model is filled, no more than one unit's weights are whole; the values are those of one rank."""
    wanted = {
        name: value.tolist() for name, value in placed(opened("single"), ForMeta, init="meta").state_dict().items()
    }
    for most, state in two.run(_meta_on_ranks):
        assert most == 2
        assert state == wanted


class Whole(Blocks):
    """A model that initialises everything in one function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for value in self.parameters():
            nn.init.constant_(value, 0.5)


def _whole_on_ranks() -> str:
    strategy = opened("fsdp")
    return attempt(lambda: placed(strategy, Whole, init="meta"))


def test_an_initialisation_over_units_is_refused_by_fsdp(two: RankPool) -> None:
    """One function that fills several units works whole, and is refused where they are sharded one by one."""
    model = placed(opened("single"), Whole, init="meta")
    assert {float(value.detach().mean()) for value in model.parameters()} == {0.5}
    assert all("Whole" in said for said in two.run(_whole_on_ranks))
