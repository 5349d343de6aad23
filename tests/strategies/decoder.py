"""Room: a small decoder that tensor ranks can split, and a whole run of it, with what to compare."""
# ruff: noqa: D102 - forward is torch's word

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import worldsize as ws

if TYPE_CHECKING:
    from pathlib import Path

WORDS, WIDTH, HEADS, LENGTH, STEPS = 20, 16, 4, 6, 5
PLAN: dict[str, Any] = {
    "embed": "rowwise",
    r"layers\.\d+\.attention\.(q|k|v)": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_rep",
}
SEQUENCE: dict[str, Any] = {
    **PLAN,
    "embed": "rowwise_sequence",
    "norm": "sequence",
    "layers.*.first": "sequence",
    "layers.*.second": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.o": "rowwise_sequence",
    "layers.*.up": "colwise_sequence",
    "layers.*.down": "rowwise_sequence",
    "layers.*.drop": "sequence",
    "head": "colwise_rep_sequence",
}


class Attention(nn.Module):
    """Causal, in heads of a fixed size."""

    def __init__(self, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop, self.by_number = heads, drop, False
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        cut = (self.heads, -1) if self.by_number else (-1, WIDTH // self.heads)
        q, k, v = (part(x).unflatten(-1, cut).transpose(1, 2) for part in (self.q, self.k, self.v))
        drop = self.drop if self.training else 0.0
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        return self.o(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, heads: int = HEADS, drop: float = 0.0, inner: float = 0.0, attention: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(heads, attention)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop, self.inner = nn.Dropout(drop), nn.Dropout(inner)

    def forward(self, x: Tensor) -> Any:
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.down(self.inner(functional.gelu(self.up(self.second(x))))))


class Decoder(nn.Module):
    """Embedding tied to the head, two layers, a norm."""

    def __init__(self, **layer: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Dropping(Decoder):
    """Drop-out where activations are whole, and where tensor ranks hold a part of them."""

    def __init__(self) -> None:
        super().__init__(drop=0.2, inner=0.3)


class DroppingInAttention(Decoder):
    """Drop-out inside of attention: in the shape of this rank's heads."""

    def __init__(self) -> None:
        super().__init__(attention=0.2)


class ShortHeads(Decoder):
    """Cuts heads by their number, so that parts of them would pass for whole ones."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention.by_number = True


class Planned(Decoder):
    """Carries its plan."""

    def tp_plan(self) -> dict[str, str]:
        return PLAN


def texts(count: int = 34) -> TensorDataset:
    """Sequences of words."""
    source = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(WORDS, (count, LENGTH + 1), generator=source), torch.arange(count))


def train(
    folder: Path,
    kind: type[Decoder] = Decoder,
    options: dict[str, Any] | None = None,
    until: int = STEPS,
    **more: Any,
) -> dict[str, Any]:
    """A run with clipping, a schedule, an average, an evaluation and predictions, up to a step."""
    given = {"precision": "fp64", "device": "cpu", **more}
    run = ws.Run(folder, global_batch=12, micro_batch=2, duration=f"{until}st", seed=3, **given)
    model = run.model(kind, **(options or {}))
    opt = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 0.01), model, clip=0.8)
    run.schedule(opt, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 2 * STEPS))
    average = run.average(model, 0.9)
    found: dict[str, Any] = {"losses": {}, "norms": {}, "rates": {}, "score": {}}

    def losses(batch: Any) -> Tensor:
        ids = batch[0]
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    for step in run.steps(texts(), count=lambda batch: batch[0].shape[0] * LENGTH):
        for batch in step.micro_batches:
            step.backward(losses(batch))
        norm = step.update()
        assert norm is not None
        found["losses"][step.index], found["norms"][step.index] = float(step.loss), float(norm)
        found["rates"][step.index] = opt.param_groups[0]["lr"]
        if step.ends_epoch:
            score = run.evaluate(lambda b: {"loss": losses(b).view(len(b[0]), -1).mean(1)}, texts(7), model=model)
            found["score"][step.index] = score["loss"]
    out = run.predict(lambda b: model(b[0][:, :-1]).mean(2), texts(5), model=model)
    with average.applied():
        found["average"] = {name: value.tolist() for name, value in run.whole(model).items()}
    found["weights"] = {name: value.tolist() for name, value in run.whole(model).items()}
    return {**found, "predicted": out.tolist()}


def same(found: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-10) -> None:
    """Assert that two runs agree in everything that both saw."""
    for what in ("losses", "norms", "rates", "score"):
        for index, value in found[what].items():
            assert abs(value - wanted[what][index]) <= bound * abs(wanted[what][index]), (what, index)
    for what in ("weights", "average"):
        assert found[what].keys() == wanted[what].keys()
        for name, value in found[what].items():
            assert torch.allclose(torch.tensor(value), torch.tensor(wanted[what][name]), rtol=0, atol=bound), name
    assert torch.allclose(torch.tensor(found["predicted"]), torch.tensor(wanted["predicted"]), rtol=0, atol=bound)
