"""Room: real trainings of a few steps, as every layout leaves them: tied weights, running statistics, an average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import worldsize as ws
from tests.pools import pool

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2}
"""Strategy -> ranks."""


class Net(nn.Module):
    """Two names for one matrix, running statistics, and parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.tied = nn.Linear(8, 12), nn.Linear(8, 12, bias=False)
        self.tied.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(12)
        self.out, self.frozen = nn.Linear(12, 4, bias=False), nn.Linear(8, 12).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers a sample."""
        found: torch.Tensor = self.out(self.norm(self.emb(x) + self.tied(x) + self.frozen(x)))
        return found


def make(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, with and without decay."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wide, flat = [each for each in own if each.ndim > 1], [each for each in own if each.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": wide}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, 0.01)


def train(folder: Path, strategy: str, precision: str = "fp32", lr: float = 0.1) -> dict[str, torch.Tensor]:
    """Four steps on this rank. Returns the whole model as torch has it."""
    settings: dict[str, Any] = {"strategy": strategy, "precision": precision, "device": "cpu"}
    run = ws.Run(folder, global_batch=8, micro_batch=2, duration="4st", **settings)
    model = run.model(Net, name="net")
    optimizer = run.optimizer(make, model)
    run.schedule(optimizer, lambda own: torch.optim.lr_scheduler.StepLR(own, 2, gamma=lr))
    run.average(model, 0.9)
    kept = run.keep(seen=0)
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    for step in run.steps(torch.utils.data.TensorDataset(data)):
        for (x,) in step.micro_batches:
            step.backward((model(x) - 1).square().mean(1))
        step.update()
        kept.seen += 1
    return {name: tensor.detach().clone() for name, tensor in run.whole(model).items()}


def trained(folder: Path, strategy: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Train in a layout; the whole model at the end, as torch has it."""
    found: dict[str, torch.Tensor] = pool(LAYOUTS[strategy]).run(train, folder, strategy, **settings)[0]
    return found
