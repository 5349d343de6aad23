"""Distributed training on drawn data: the program of a Slurm job, and of any other start.

    worldsize submit -c job.yaml                                  two nodes, one GPU each
    worldsize run --nproc-per-node 2 train.py --epochs 3          here
    python train.py --epochs 3                                    one process

`--batch_size` is per rank: a step learns from batch_size x accumulate x ranks samples, and that belongs to the run.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import worldsize as ws

if TYPE_CHECKING:
    from collections.abc import Iterator

INPUTS, CLASSES, HELD_OUT = 20, 4, 5
RULE = "=" * 42


def data(size: int) -> tuple[TensorDataset, TensorDataset]:
    """(training set, validation set): `size` samples of a rule that can be learnt, and a fifth as many more."""
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(size + size // HELD_OUT, INPUTS, generator=drawn)
    labels = (inputs[:, :CLASSES] + 0.5 * inputs[:, CLASSES : 2 * CLASSES]).argmax(dim=1)
    return TensorDataset(inputs[:size], labels[:size]), TensorDataset(inputs[size:], labels[size:])


def net() -> nn.Module:
    """A multi-layer perceptron."""
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def main() -> None:
    """Train, validate after each epoch, leave the model's weights in one file."""
    args = arguments()
    train_set, validation_set = data(args.data_size)
    run = ws.Run(
        args.run_dir,
        global_batch=args.batch_size * args.accumulate * ws.here().size,
        micro_batch=args.batch_size,
        duration=f"{args.epochs}ep",
        precision="bf16" if args.amp else "fp32",
        saving=ws.Saving(every=f"{args.save_every}ep"),
        data=train_set,
    )
    for line in banner(run, args):
        run.say(line)
    model = run.model(net)
    run.optimizer(lambda m: torch.optim.Adam(m.parameters(), args.lr), model)
    kept = run.keep(loss=0.0, batch=0)

    def scores(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        outputs = model(batch[0])
        return {
            "val_loss": cross_entropy(outputs, batch[1], reduction="none"),
            "val_accuracy": outputs.argmax(1) == batch[1],
        }

    for step in run.steps():
        for inputs, labels in step.micro_batches:
            step.backward(cross_entropy(model(inputs), labels, reduction="none"))
        step.update()
        if not step.made:  # a step whose validation was interrupted is offered again, and counts once
            loss = float(step.loss)
            if kept.batch % 10 == 0:
                run.say(f"Batch {kept.batch}, Loss: {loss:.4f}")
            kept.loss, kept.batch = kept.loss + loss * step.totals["samples"], kept.batch + 1
        if step.ends_epoch:
            found = run.evaluate(scores, validation_set)
            run.log(found)
            run.say(f"Epoch {step.epoch + 1}/{args.epochs}, Average Loss: {kept.loss / len(train_set):.4f}")
            run.say(f"Validation: loss {found['val_loss']:.4f}, accuracy {found['val_accuracy']:.4f}")
            kept.loss, kept.batch = 0.0, 0
    weights = run.whole(model)
    if run.comm.rank == 0:
        torch.save(weights, Path(args.run_dir, "model_distributed.pt"))
    run.say("Training completed successfully!")


def banner(run: ws.Run, args: argparse.Namespace) -> Iterator[str]:
    """Where this runs, on how much, and what is asked for."""
    world, job = ws.here(), os.environ
    yield from (RULE, "Distributed Training Example", RULE)
    yield f"Job ID: {job.get('SLURM_JOB_ID', 'none')}"
    yield f"Number of nodes: {world.nodes}"
    yield f"Node list: {job.get('SLURM_JOB_NODELIST', socket.gethostname())}"
    yield f"Master address: {world.master_addr or socket.gethostname()}"
    yield f"World size: {world.size}"
    yield from ("", "Rank, local rank, node, device:")
    yield from run.comm.gather(f"{world.rank}, {world.local_rank}, {socket.gethostname()}, {device()}")
    yield from ("", RULE, "Starting training...", RULE)
    yield f"Epochs: {args.epochs}, Batch size: {args.batch_size}, LR: {args.lr}"


def device() -> str:
    """What this rank computes on."""
    if not torch.cuda.is_available():
        return "cpu"
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.name}, {found.total_memory // 2**20} MB"


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description="Distributed training on drawn data.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="samples of a forward pass on one rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data_size", type=int, default=1000, help="training samples")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes of each rank in one step")
    parser.add_argument("--amp", action="store_true", help="automatic mixed precision, bf16")
    parser.add_argument("--save_every", type=int, default=5, help="epochs between checkpoints")
    parser.add_argument("--run_dir", default="runs/slurm_ddp", help="the run folder, which all nodes see")
    return parser.parse_args()


if __name__ == "__main__":
    main()
