"""Room: one decoder trained for some steps by one engine, ours or the engine's own loop. The answer is a line of JSON.

worldsize run --nproc-per-node 2 decoder.py fsdp-ours|fsdp-plain|zero3-ours|zero3-plain
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

WARM = 5


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, length, width)."""
        samples, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 128)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (samples, length). Returns (samples, length, words)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def losses(model: nn.Module, words: Tensor) -> Tensor:
    """One for each token that follows others: words (samples, length + 1) -> (samples · length)."""
    logits: Tensor = model(words[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten(), reduction="none")


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=torch.cuda.is_available())


class Clock:
    """Time of the steps after the first ones, with the device's work in it; and how the host's part of them spreads."""

    def __init__(self, steps: int) -> None:
        self._steps, self._made = steps, 0
        self._at: list[tuple[float, float, float]] = []
        self._whole: list[float] = []
        self._parts: dict[str, list[float]] = {}
        self._since = time.perf_counter()

    def part(self, name: str) -> None:
        """A part of a step has ended, on the host."""
        before, self._since = self._since, time.perf_counter()
        if self._made >= WARM:
            self._parts.setdefault(name, []).append(1e3 * (self._since - before))

    def step(self) -> None:
        """A step has ended."""
        self.part("update")
        self._made += 1
        if self._made in (WARM, self._steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._whole.append(time.perf_counter())
        if self._made >= WARM:
            self._at.append((time.perf_counter(), time.thread_time(), time.process_time()))

    def numbers(self) -> dict[str, float]:
        """Milliseconds of a step, between ends of steps on the host, of a step's work (thread, process), of its parts."""
        began, ended = self._whole
        steps = self._steps - WARM
        between = sorted(1e3 * (after[0] - before[0]) for before, after in pairwise(self._at))
        work, all_work = (1e3 * (self._at[-1][which] - self._at[0][which]) / steps for which in (1, 2))
        return {
            "ms": 1e3 * (ended - began) / steps, "least": between[0], "median": between[steps // 2],
            "most": between[-1], "thread": work, "process": all_work,
            **{name: sum(taken) / len(taken) for name, taken in self._parts.items()},
        }  # fmt: skip


def ours(
    strategy: str, model: Callable[[], nn.Module], tokens: Tensor, asked: argparse.Namespace, clock: Clock
) -> None:
    """As a user writes it."""
    import worldsize as ws

    ranks = int(os.environ["WORLD_SIZE"])
    run = ws.Run(
        f"{asked.dir}/run", global_batch=asked.batch * ranks, micro_batch=asked.batch, duration=f"{asked.steps}st",
        strategy=strategy, precision="bf16", saving=ws.Saving(every=None),
    )  # fmt: skip
    placed = run.model(model, **({"deepspeed": {"bf16": {"enabled": True}}} if strategy == "zero3" else {}))
    run.optimizer(optimizer, placed)
    for step in run.steps(TensorDataset(tokens), count=lambda batch: batch[0][:, 1:].numel()):
        for (words,) in step.micro_batches:
            clock.part("data")
            loss = losses(placed, words)
            clock.part("forward")
            step.backward(loss)
            clock.part("backward")
        step.update()
        clock.step()
        if step.index + 1 == asked.steps:
            answer(clock, float(step.loss))
            os._exit(0)  # the last commit is not measured here


def fsdp_plain(model: Callable[[], nn.Module], tokens: Tensor, asked: argparse.Namespace, clock: Clock) -> None:
    """FSDP2 by hand."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = join()
    whole = model().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in whole.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(whole, mp_policy=policy)
    moved = optimizer(whole)
    for words in batches(tokens, asked, device):
        clock.part("data")
        with torch.autocast(device.type, torch.bfloat16):
            loss = losses(whole, words).mean()
        clock.part("forward")
        loss.backward()
        clock.part("backward")
        moved.step()
        moved.zero_grad()
        clock.step()
    answer(clock, float(loss))


def zero3_plain(model: Callable[[], nn.Module], tokens: Tensor, asked: argparse.Namespace, clock: Clock) -> None:
    """DeepSpeed by hand."""
    import deepspeed

    device = join()
    whole = model()
    config = {
        "train_micro_batch_size_per_gpu": asked.batch, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(model=whole, optimizer=optimizer(whole), config=config)
    for words in batches(tokens, asked, device):
        clock.part("data")
        loss = losses(engine, words).mean()
        clock.part("forward")
        engine.backward(loss)
        clock.part("backward")
        engine.step()
        clock.step()
    answer(clock, float(loss))


def join() -> torch.device:
    """The process group, and this rank's device."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def batches(tokens: Tensor, asked: argparse.Namespace, device: torch.device) -> Any:
    """This rank's of each step, on the device."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(asked.steps):
        start = (step * ranks + rank) * asked.batch
        yield (
            tokens[start : start + asked.batch].pin_memory().to(device, non_blocking=True)
            if device.type == "cuda"
            else tokens[start : start + asked.batch]
        )


def answer(clock: Clock, loss: float) -> None:
    """One line from rank 0."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if int(os.environ["RANK"]) == 0:
        sys.stdout.write(json.dumps({**clock.numbers(), "peak": peak, "loss": loss}) + "\n")
        sys.stdout.flush()


def main() -> None:
    """One variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=["fsdp-ours", "fsdp-plain", "zero3-ours", "zero3-plain"])
    for name, value in (
        ("width", 2048),
        ("layers", 18),
        ("words", 32000),
        ("length", 1024),
        ("batch", 4),
        ("steps", 45),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", default="runs/decoder")
    asked = parser.parse_args()
    asked.steps = max(asked.steps, WARM + 1)
    ranks = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    tokens = torch.randint(0, asked.words, (asked.steps * ranks * asked.batch, asked.length + 1))
    clock = Clock(asked.steps)

    def model() -> nn.Module:
        return Decoder(asked.width, asked.layers, asked.words)

    if asked.variant.endswith("ours"):
        ours(asked.variant.partition("-")[0], model, tokens, asked, clock)
    else:
        {"fsdp-plain": fsdp_plain, "zero3-plain": zero3_plain}[asked.variant](model, tokens, asked, clock)


if __name__ == "__main__":
    main()
