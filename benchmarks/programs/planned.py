"""Room: a decoder whose layout is chosen from outside: what `worldsize plan` is compared on.

worldsize run --nproc-per-node 4 --strategy fsdp planned.py --width 1024
"""

from __future__ import annotations

import argparse

import decoder
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import worldsize as ws


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, size: int, drop: float) -> None:
        super().__init__()
        self.head_dim, self.drop = size, nn.Dropout(drop)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, length, width)."""
        before = self.norm1(x)
        q, k, v = (
            part(before).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))
        return out


class Decoder(decoder.Decoder):
    """A causal language model: a chain, so that it can lie in stages."""

    def __init__(self, width: int, depth: int, words: int, drop: float) -> None:
        super().__init__(width, 0, words)
        self.blocks = nn.ModuleList(Block(width, min(width, 64), drop) for _ in range(depth))

    tp_plan = {  # noqa: RUF012 - as models carry theirs
        **dict.fromkeys(("blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up"), "colwise"),
        **dict.fromkeys(("blocks.*.out", "blocks.*.down"), "rowwise"),
    }


def main() -> None:
    """Train."""
    asked = arguments()
    rows = torch.arange(asked.global_batch * 4 * asked.length).view(-1, asked.length) % asked.words
    run = ws.Run(
        asked.dir, global_batch=asked.global_batch, micro_batch=asked.micro_batch, duration="4st",
        precision=asked.precision, saving=ws.Saving(every=None), data=TensorDataset(rows),
    )  # fmt: skip
    model = run.model(
        lambda: Decoder(asked.width, asked.depth, asked.words, asked.drop),
        init=asked.init,
        activation_checkpointing=asked.recompute,
        schedule=asked.schedule,
    )
    run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-4, fused=asked.fused or None), model, clip=1.0)
    for step in run.steps():
        for (tokens,) in step.micro_batches:
            logits = model(tokens)
            losses = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            step.backward(losses.view(len(tokens), -1).mean(1))
        step.update()


def arguments() -> argparse.Namespace:
    """The shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/planned")
    for name, value in (("width", 256), ("depth", 4), ("words", 2048), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("global-batch", 32), ("micro-batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--init", default="here")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--fused", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
