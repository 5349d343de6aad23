"""One GPU (or the CPU): the whole training. The other programs of this folder only start it in other ways.

    python singlegpu.py --total_epochs 50 --save_every 10 --batch_size 32

`--batch_size` is per rank, as in PyTorch's tutorial: a step learns from batch_size x ranks samples.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import worldsize as ws
from worldsize.errors import LayoutError
from worldsize.runtime import env

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.train.step import Step

SAMPLES, INPUTS = 2048, 20


def dataset() -> TensorDataset:
    """2,048 samples of a function that can be learnt: 20 numbers in, one out."""
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.rand(SAMPLES, INPUTS, generator=drawn)
    return TensorDataset(inputs, torch.sin(3 * inputs[:, :4]).sum(dim=1, keepdim=True))


def mlp() -> nn.Module:
    """A multi-layer perceptron."""
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 1))


def train(total_epochs: int, save_every: int, batch_size: int, run_dir: str) -> None:
    """Train on this rank; go on where the run folder stands.

    Args:
        total_epochs: how many epochs the training has, those before a restart included.
        save_every: epochs between checkpoints; the last epoch is always saved.
        batch_size: samples of a step on each rank.
        run_dir: the run folder; on several nodes all must see it.
    """
    ranks = env.detect(env.read()).size
    run = ws.Run(
        run_dir,
        global_batch=batch_size * ranks,
        micro_batch=batch_size,
        duration=f"{total_epochs}ep",
        saving=ws.Saving(every=f"{save_every}ep", synchronous=True),
        accept=("micro_batch",),  # a layer that normalises over its batch would forbid this
        data=dataset(),
    )
    model = run.model(mlp)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9), model)
    kept = run.keep(batch={})
    report = Report(run, Path(run_dir), total_epochs, save_every)
    try:
        for step in run.steps():
            report.before(step)
            kept.batch = {"per_rank": batch_size, "ranks": ranks, "step": batch_size * ranks}
            for inputs, targets in step.micro_batches:
                step.backward(loss(model(inputs), targets))
            step.update()
    except LayoutError as error:
        raise explained(error, Path(run_dir), ranks) from error
    report.end()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number a sample."""
    return mse_loss(outputs, targets, reduction="none")


class Report:
    """The tutorial's lines. Epochs in them are finished epochs: "at epoch 20" goes on with epoch 20, the 21st."""

    def __init__(self, run: ws.Run, run_dir: Path, total_epochs: int, save_every: int) -> None:
        self._run, self._run_dir, self._every = run, run_dir, save_every
        self._total, self._steps = total_epochs, run.total_steps // total_epochs
        self._first: int | None = None

    def before(self, step: Step) -> None:
        """What is told before a step."""
        within = step.index % self._steps
        if self._first is None:
            self._first = step.epoch
            if step.index > 0:
                inside = f", step {within} of {self._steps}" if within else ""
                self._once(lambda: f"Resuming training from snapshot at epoch {step.epoch}{inside}")
        elif within == 0 and step.epoch % self._every == 0:
            self._once(lambda: self._saved(step.epoch))
        if within == 0:
            rank = self._run.comm.rank
            print(f"[GPU{rank}] Epoch {step.epoch} | Batchsize: {len(step.ids)} | Steps: {self._steps}", flush=True)

    def end(self) -> None:
        """What is told when the last step was made."""
        if self._first is not None:
            self._once(lambda: self._saved(self._total))

    def _saved(self, epochs: int) -> str:
        newest = max((self._run_dir / "checkpoints").glob("step-*"))
        return f"Epoch {epochs} | Training checkpoint saved at {newest}"

    def _once(self, line: Callable[[], str]) -> None:
        """By one process of all nodes: its rank in the whole world is 0, not only its rank on the node."""
        if self._run.comm.rank == 0:
            print(line(), flush=True)


def explained(error: LayoutError, run_dir: Path, ranks: int) -> LayoutError:
    """The same error in the words of a batch size per rank."""
    began = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["config"]
    step, per_rank = began["global_batch"], began["micro_batch"]
    if f"global_batch: began with {step}" not in str(error.found):
        return error
    if step % ranks:
        fitting = ", ".join(str(count) for count in range(1, step + 1) if step % count == 0)
        do = f"start a number of ranks that divides {step}: {fitting}"
    else:
        do = f"give --batch_size {step // ranks}"
    return LayoutError(
        f"--batch_size is per rank: this run is one of {per_rank} on {step // per_rank} rank(s): {step} samples a step",
        found=f"{ranks} rank(s) now; {error.found}",
        do=f"{do}; or choose another --run_dir",
    )


def arguments(run_dir: str) -> argparse.ArgumentParser:
    """The tutorial's flags."""
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total_epochs", type=int, default=50, help="Total epochs to train the model")
    parser.add_argument("--save_every", type=int, default=10, help="How often to save a snapshot, in epochs")
    parser.add_argument("--batch_size", type=int, default=32, help="Batch size on each rank (default: 32)")
    parser.add_argument("--run_dir", default=run_dir, help=f"Run folder (default: {run_dir})")
    return parser


if __name__ == "__main__":
    train(**vars(arguments("runs/singlegpu").parse_args()))
