#!/usr/bin/env python
"""One program for every strategy: how the model lies over the ranks is an argument, and nothing else changes.

worldsize run --nproc-per-node 2 train.py -s ddp
torchrun --standalone --nproc-per-node 2 train.py -s fsdp
deepspeed --num_gpus 2 train.py -s deepspeed --deepspeed
horovodrun -np 2 -H localhost:2 ./train.py -s horovod
mpirun -np 2 python train.py -s horovod
"""

from __future__ import annotations

import argparse
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import worldsize as ws

SAMPLES, INPUTS = 640, 16


def data() -> TensorDataset:
    """Samples of a function that can be learnt."""
    inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :4].prod(dim=1, keepdim=True))


class Block(nn.Module):
    """A residual unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


class Net(nn.Sequential):
    """A chain, which a pipeline can cut; the plan says how tensor ranks split the layers of each block."""

    tp_plan: ClassVar = {"*.up": "colwise", "*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__(nn.Linear(INPUTS, 32), *(Block() for _ in range(6)), nn.Linear(32, 1))


def main() -> None:
    """Train under the strategy that is named."""
    parser = argparse.ArgumentParser(description="One training, any strategy.")
    parser.add_argument("-s", "--strategy", default="ddp", help="ddp, fsdp, hsdp, deepspeed, zero0 to zero3, horovod")
    parser.add_argument("--deepspeed", action="store_true", help="what DeepSpeed's users write; -s decides")
    parser.add_argument("--deepspeed_config", help="DeepSpeed's JSON file")
    parser.add_argument("--local_rank", help="from DeepSpeed's launcher; the environment says it too")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--run_dir", default="runs/strategies", help="the run folder; another strategy goes on with it"
    )
    args = parser.parse_args()
    run = ws.Run(args.run_dir, global_batch=64, micro_batch=8, duration=f"{args.epochs}ep", strategy=args.strategy)
    model = run.model(Net, **({"deepspeed": args.deepspeed_config} if args.deepspeed_config else {}))
    run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), model)
    for step in run.steps(data()):
        for inputs, targets in step.micro_batches:
            step.backward(mse_loss(model(inputs), targets, reduction="none"))
        step.update()
        if step.ends_epoch:
            run.say(
                f"strategy {args.strategy}, {ws.here().size} ranks: epoch {step.epoch}, loss {float(step.loss):.6f}"
            )


if __name__ == "__main__":
    main()
