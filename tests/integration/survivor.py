"""A training that takes its time while it is to be disturbed: `survivor.py RUN STEPS SAVE_EVERY ATTEMPTS SECONDS`.

It rests SECONDS in each step of its first ATTEMPTS starts, and hurries from then on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import worldsize as ws

LENGTH, GLOBAL, MICRO = 96, 16, 4


class Sums(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbers and their sum."""

    def __init__(self) -> None:
        self.x = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum()


def main(folder: str, steps: str, every: str, attempts: str, seconds: str) -> None:
    """Train to the end, or until it is stopped."""
    before = len(list(Path(folder).glob("attempts/*/owner.json")))
    rest = float(seconds) if before < int(attempts) else 0.0
    saving = ws.Saving(every=None if every == "never" else every)
    run = ws.Run(
        folder, global_batch=GLOBAL, micro_batch=MICRO, duration=f"{steps}st", seed=3, precision="fp64", device="cpu",
        saving=saving,
    )  # fmt: skip
    model = run.model(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-2), model)
    for step in run.steps(Sums()):
        for x, y in step.micro_batches:
            step.backward((model(x).squeeze(1) - y).pow(2))
        step.update()
        time.sleep(rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
