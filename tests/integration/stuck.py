"""A training that gets stuck in one rank, once or always: `stuck.py RUN HOW [settings as JSON]`; see `HOW` below.

It hangs in step 5 of its first start. A file `hung-<n>` in the run's parent folder counts how often, and holds the rank's id.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import worldsize as ws

if TYPE_CHECKING:
    from collections.abc import Callable

STEP, STEPS, WHO = 5, 9, 1


class Sums(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbers and their sum; one of them may never come."""

    def __init__(self, hang: Callable[[], None] | None) -> None:
        self.x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.hang, self.count = hang, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.count += 1
        if self.hang is not None and self.count > 40:
            self.hang()
        return self.x[index], self.x[index].sum()


def stopped() -> None:
    """By a signal, as by a person at a terminal or a debugger."""
    os.kill(os.getpid(), signal.SIGSTOP)


def spinning() -> None:
    """In Python: other threads still get their turn."""
    while True:
        pass


def holding() -> None:
    """In C, with the interpreter held."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def sleeping() -> None:
    """In a call that never returns, as to a file system that is gone."""
    time.sleep(1000)


HOW: dict[str, Callable[[], None]] = {
    "stopped": stopped, "spinning": spinning, "holding": holding, "sleeping": sleeping, "worker": sleeping,
    "skipped": lambda: None, "never": lambda: None,
}  # fmt: skip


def main(folder: str, how: str, settings: str = "{}") -> None:
    """Train to the end, or get stuck."""
    asked: dict[str, Any] = json.loads(settings)
    always = asked.pop("always", False)
    beside = Path(folder).parent
    rank = int(os.environ.get("RANK", "0"))
    before = len(list(beside.glob("hung-*")))
    hung: list[str] = []

    def hang() -> None:
        chosen = rank == min(WHO, int(os.environ.get("WORLD_SIZE", "1")) - 1) and (always or not before)
        if chosen and not hung:
            hung.append(how)
            (beside / f"hung-{before}").write_text(str(os.getpid()))
            HOW[how]()

    run = ws.Run(
        folder, global_batch=16, micro_batch=4, duration=f"{STEPS}st", seed=3, precision="fp64", device="cpu",
        saving=ws.Saving(every="1st", synchronous=True), **asked,
    )  # fmt: skip
    model = run.model(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-2), model)
    group = dist.new_group() if dist.is_initialized() else None
    workers = 1 if how == "worker" else 0
    data = Sums(hang if how == "worker" else None)
    for step in run.steps(torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers)):
        now = step.index == STEP
        for x, y in step.micro_batches:
            if now and how not in ("worker", "skipped"):
                hang()
            step.backward((model(x).squeeze(1) - y).pow(2))
        if now and how == "skipped" and (rank != WHO or before):
            (beside / "hung-0").touch()
            dist.all_reduce(torch.zeros(1), group=group)
        step.update()


if __name__ == "__main__":
    main(*sys.argv[1:])
