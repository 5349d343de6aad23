"""Room: models that a pipeline cuts, or must refuse, and one training of each that any layout can do."""
# ruff: noqa: D102 - forward is torch's word

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import worldsize as ws
from tests.pools import pool
from worldsize.errors import WorldsizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

WIDTH = 6


class Unit(nn.Module):
    """A residual unit."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Any:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Written(nn.Module):
    """A chain that is written as a class: lists, a normalisation with running statistics, and a module that is never called."""

    drop = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        self.first, self.norm, self.act = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()
        self.units = nn.ModuleList(Unit(self.drop) for _ in range(3))
        self.tail = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.norm(self.first(x)))
        for unit in self.units:
            x = unit(x)
        return self.tail(x)

    def encode(self, x: Tensor) -> Any:
        return self.first(x)


class Dropping(Written):
    """With drop-out."""

    drop = 0.3


class Square(torch.autograd.Function):
    """A node of the graph that is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight * weight, (2 * grad * x * weight).sum(0)


class Squares(nn.Module):
    """Its weight's gradient comes out of such a node."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return Square.apply(x, self.weight)  # type: ignore[no-untyped-call]


class Custom(nn.Sequential):
    """A chain of such modules among others."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), Squares(), Unit(), Squares(), Unit(), nn.Linear(WIDTH, 3), Three())


class Compiled(nn.Sequential):
    """A chain with parts that the program compiles itself: in place, and wrapped."""

    def __init__(self) -> None:
        whole: Any = torch.compile(Unit())
        super().__init__(nn.Linear(WIDTH, WIDTH), Unit(), whole, nn.Linear(WIDTH, 3))
        self[1].compile()


class Bound(Written):
    """A forward is compiled without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.forward = torch.compile(self.norm.forward, backend="eager")  # type: ignore[method-assign]


class Still(Written):
    """Nothing before its last units is trained."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.first, self.norm, self.units[0]):
            part.requires_grad_(requires_grad=False)


class Three(nn.Module):
    """Squares at the very end of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return Square.apply(x, self.weight)  # type: ignore[no-untyped-call]


class Begin(nn.Module):
    """Gives two tensors on, one of them whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(words), words


class End(nn.Module):
    """Takes both, and returns more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, words: Tensor) -> dict[str, Tensor]:
        hidden = self.mix(x).cumsum(1) * (words > 0).unsqueeze(-1)
        return {"logits": self.out(torch.tanh(hidden)), "size": hidden.square().mean((1, 2))}


class Sayer(nn.Module):
    """No chain: it says itself what its stages are. For sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = Begin(), End()

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.end(*self.begin(words))
        return found

    def pipeline_stages(self, n: int) -> Sequence[nn.Module]:
        assert n == 2
        return [self.begin, self.end]


class Residual(Written):
    """Computes something between its modules."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + x[:, :3]


class Backwards(Written):
    """Calls its modules in another order than it has them."""

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.first(self.units[0](x)))


class Tied(nn.Sequential):
    """Its ends share a weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), Unit(), Unit(), nn.Linear(WIDTH, WIDTH))
        self[3].weight = self[0].weight


class Loose(Written):
    """A parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Picky(Written):
    """Keeps only some rows, by their values."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x[x[:, 0] > 0])


def rows(length: int = 26) -> list[tuple[Tensor, int]]:
    """Samples with one of three labels."""
    drawn = torch.Generator().manual_seed(1)
    return [(torch.randn(WIDTH, generator=drawn), index % 3) for index in range(length)]


def texts(length: int = 24) -> list[Tensor]:
    """Sequences of words, longer and longer."""
    drawn = torch.Generator().manual_seed(2)
    return [torch.randint(7, (3 + index % 4,), generator=drawn) for index in range(length)]


def padded(words: Sequence[Tensor]) -> Tensor:
    """As long as the longest of them."""
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True)


def label(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss a sample."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@torch.compile(backend="eager")
def compiled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same, with the call of the model in a compiled function."""
    return label(model, batch)


def following(model: nn.Module, words: Tensor) -> Tensor:
    """One loss a sequence, of both outputs."""
    found = model(words)
    each = functional.cross_entropy(found["logits"].transpose(1, 2), words.roll(-1, 1), reduction="none")
    total: Tensor = each.mean(1) + 0.1 * found["size"]
    return total


@dataclass(slots=True)
class Task:
    """A training as any layout does it."""

    build: Callable[[], nn.Module] = Written
    data: Callable[[], Any] = rows
    loss: Callable[[nn.Module, Any], Tensor] = label
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    batch: tuple[int, int] = (8, 2)
    steps: int = 8


def ran(task: Task, ranks: int) -> list[dict[str, Any]]:
    """What came of it on each of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return pool(ranks).run(work, task, folder)


def said(task: Task, ranks: int = 2) -> list[str]:
    """What its error says on each rank; "passed" where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        return pool(ranks).run(_said, task, folder)


def work(task: Task, folder: str) -> dict[str, Any]:
    """Train. Returns what came of it on this rank: numbers, weights, scores, names."""
    total, micro = task.batch
    run = ws.Run(
        folder, global_batch=total, micro_batch=micro, duration=f"{task.steps}st", device="cpu", precision=task.precision,
        saving=ws.Saving(every=None), **task.sizes,
    )  # fmt: skip
    try:
        return _work(run, task)
    finally:
        run.close()


def _work(run: ws.Run, task: Task) -> dict[str, Any]:
    data = task.data()
    collated: Any = padded if isinstance(data[0], Tensor) else None
    loader = torch.utils.data.DataLoader(data, batch_size=task.batch[1], shuffle=True, collate_fn=collated)
    model = run.model(task.build, **task.options)
    optimizer = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 0.01), model, clip=0.5)
    losses, norms = [], []
    for step in run.steps(loader):
        for batch in step.micro_batches:
            step.backward(task.loss(model, batch))
        norms.append(step.update())
        losses.append(step.loss)

    def score(batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"loss": task.loss(model, batch)}

    return {
        "losses": [float(loss) for loss in losses],
        "norms": [float(norm) for norm in norms if norm is not None],
        "scores": run.evaluate(score, torch.utils.data.DataLoader(data, batch_size=3, collate_fn=collated)),
        "weights": {name: value.tolist() for name, value in run.whole(model).items()},
        "names": [name for name, _ in model.named_parameters()],
        "trained": len(optimizer.param_groups[0]["params"]),
        "kind": type(model).__name__,
    }


def _said(task: Task, folder: str) -> str:
    try:
        work(task, folder)
    except WorldsizeError as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def numbers(found: Mapping[str, Any], names: Iterable[str] = ("losses", "norms")) -> list[float]:
    """The numbers of a training in one row, with its scores and weights."""
    row = [value for name in names for value in found[name]] + list(found["scores"].values())
    flat = [torch.tensor(value, dtype=torch.float64).flatten() for value in found["weights"].values()]
    return [*row, *torch.cat(flat).tolist()]
