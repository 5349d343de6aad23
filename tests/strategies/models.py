"""Room: small models of every kind that strategies meet, each with the loss that uses it."""
# ruff: noqa: D102 - forward and reset_parameters are torch's words

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 6


class Block(nn.Module):
    """A residual block with drop-out."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Any:
        return x + self.drop(self.b(torch.tanh(self.a(x))))


class Blocks(nn.Module):
    """Blocks and a head: two units and a root under fsdp."""

    def __init__(self, drop: float = 0.0, out: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(drop), Block(drop)])
        self.head = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encode(x))

    def encode(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Dropping(Blocks):
    """With drop-out."""

    def __init__(self) -> None:
        super().__init__(drop=0.3)


class TiedInRoot(Blocks):
    """Input and output share a weight, both outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.inp.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encode(self.inp(x)))[:, :3].clone()


class TiedToBlock(Blocks):
    """A weight outside of the blocks is also inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(2 * WIDTH, WIDTH)
        block = self.blocks[1]
        assert isinstance(block, Block)
        self.inp.weight = block.b.weight

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.inp(torch.cat([x, x], 1)))


class TiedBlocks(Blocks):
    """Two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        second.a.weight = first.a.weight


class Frozen(Blocks):
    """Frozen and trained parameters in one unit, and a unit that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        first = self.blocks[0]
        assert isinstance(first, Block)
        first.a.requires_grad_(requires_grad=False)
        self.blocks[1].requires_grad_(requires_grad=False)


class AllFrozen(Blocks):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)


class Unused(Blocks):
    """A head that no forward pass uses, and one that only some do."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, some: bool = False) -> Any:
        hidden = self.encode(x)
        return self.head(hidden) + (self.sometimes(hidden) if some else 0.0)


class Dicts(Blocks):
    """Returns nested structures."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.encode(x)
        return {"out": (self.head(hidden), None), "hidden": [hidden], "name": "dict"}


@dataclass(frozen=True)
class Output:
    """What a model returns, as a record."""

    out: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)


class Records(Blocks):
    """Returns a frozen dataclass."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.encode(x)
        return Output(self.head(hidden), {"hidden": hidden})


class Buffers(Blocks):
    """Integer, bool and non-persistent buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.mask: Tensor
        self.table: Tensor
        self.register_buffer("steps", torch.arange(WIDTH))
        self.register_buffer("mask", torch.tensor([True, False] * (WIDTH // 2)))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.where(self.mask, x, -x) + self.table * self.steps)


class Norms(nn.Module):
    """Batch normalisation: called twice, with a plain mean, frozen, and as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH, bias=False)
        self.usual, self.mean = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.twice, self.frozen = nn.BatchNorm1d(WIDTH, momentum=0.3), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def train(self, mode: bool = True) -> Norms:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        x = self.mean(torch.tanh(self.usual(self.inp(x))))
        return self.head(self.frozen(self.twice(torch.tanh(self.twice(torch.tanh(x))))))


class NormBlocks(nn.Module):
    """Batch normalisation inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Disordered(nn.Module):
    """Uses its layers in an order other than that of their definition; one is narrower than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(1, 3), nn.Linear(WIDTH, 9)
        self.middle = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(torch.tanh(self.first(x))))


class Scalar(Blocks):
    """One of its parameters is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale


class Rotary(nn.Module):
    """A table that the constructor computes, and `reset_parameters` again."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.linspace(0, 2, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x * torch.cos(self.table)


class ForMeta(nn.Module):
    """Everything that can be built without memory: attention, norms, embedding tied to the head, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.inp = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True) for _ in range(2)]
        )
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.inp.weight

    def forward(self, x: Tensor) -> Any:
        x = self.rotary(self.inp(x))[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(torch.tanh(x[:, 0])))[:, :3].clone()


def plain(model: nn.Module, x: Tensor, y: Tensor, micro: int) -> Tensor:
    """Cross entropy of the model's output, one number a sample."""
    del micro
    return functional.cross_entropy(_first(model(x)), y, reduction="none")


def twice(model: nn.Module, x: Tensor, y: Tensor, micro: int) -> Tensor:
    """Two calls of the model for one backward."""
    return plain(model, x, y, micro) + plain(model, x * 2, y, micro)


def parts(model: nn.Module, x: Tensor, y: Tensor, micro: int) -> Tensor:
    """The call, forward itself and another method, for one backward."""
    del micro
    assert isinstance(model, Blocks)
    hidden: Tensor = model.encode(x)
    return functional.cross_entropy(model.forward(x) + model(x), y, reduction="none") + hidden.square().sum(1)


def sometimes(model: nn.Module, x: Tensor, y: Tensor, micro: int) -> Tensor:
    """A head that only the first micro-batch of the step uses: on one rank, and not in its last."""
    return functional.cross_entropy(model(x, some=micro == 0), y, reduction="none")


def penalty(model: nn.Module, x: Tensor, y: Tensor, micro: int) -> Tensor:
    """A second derivative: the norm of the gradient in the input."""
    del micro
    x = x.requires_grad_()
    out: Tensor = model(x)
    slope: Tensor = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    distance: Tensor = slope.norm(dim=1) - 1
    return functional.cross_entropy(out, y, reduction="none") + distance.square()


def _first(out: Any) -> Tensor:
    found = out["out"][0] if isinstance(out, dict) else out.out if isinstance(out, Output) else out
    assert isinstance(found, Tensor)
    return found


@dataclass(frozen=True)
class Case:
    """One thing that must train alike under every strategy."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor, int], Tensor] = plain
    options: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2,)


CASES: dict[str, Case] = {
    "blocks": Case(Blocks, ranks=(2, 3)),
    "drop-out": Case(Dropping, ranks=(2, 3)),
    "recomputed": Case(Dropping, options={"activation_checkpointing": True}),
    "recomputed norms": Case(NormBlocks, options={"activation_checkpointing": True}),
    "compiled": Case(Dropping, options={"compile": {"backend": "eager"}}),
    "compiled whole": Case(Disordered, options={"compile": {"backend": "aot_eager"}}),
    "compiled and recomputed": Case(
        Blocks, options={"compile": {"backend": "eager"}, "activation_checkpointing": True}
    ),
    "not resharded": Case(Blocks, options={"reshard": False}),
    "half of it resharded": Case(Blocks, options={"reshard": 0.5}),
    "one unit": Case(Blocks, options={"wrap": ()}),
    "units by class": Case(Blocks, options={"wrap": (nn.Linear,)}),
    "tied in the root": Case(TiedInRoot),
    "tied to a block": Case(TiedToBlock),
    "tied blocks": Case(TiedBlocks),
    "frozen": Case(Frozen),
    "unused": Case(Unused, sometimes, {"unused_parameters": "allow"}, (2, 3)),
    "small buckets": Case(Blocks, options={"bucket_mb": 0.0001}, ranks=(2, 3)),
    "two calls": Case(Blocks, twice),
    "methods": Case(Blocks, parts),
    "dict": Case(Dicts),
    "record": Case(Records),
    "buffers": Case(Buffers),
    "norms": Case(Norms, ranks=(2, 3)),
    "disordered": Case(Disordered, ranks=(2, 3)),
    "penalty": Case(Blocks, penalty, {"wrap": ()}),
    "meta": Case(ForMeta, options={"init": "meta"}, ranks=(2, 3)),
}
