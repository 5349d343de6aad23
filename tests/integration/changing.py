"""A training in a world that changes: `changing.py FOLDER STEPS SECONDS`. Says each step, and rests in it for so long.

It hurries as soon as there is FOLDER/hurry.
Each rank adds a line a step to FOLDER/said: step, loss, rank, world, process. The run is FOLDER/run; its steps have 4
micro-batches, and each of them is committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import worldsize as ws
from tests.integration.survivor import GLOBAL, MICRO, Sums


def main(folder: str, steps: str, seconds: str) -> None:
    """Train to the end, or until it is stopped."""
    run = ws.Run(
        Path(folder) / "run", global_batch=GLOBAL, micro_batch=MICRO, duration=f"{steps}st", seed=3, precision="fp64",
        device="cpu", saving=ws.Saving(every="1st"),
    )  # fmt: skip
    model = run.model(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1)))
    run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-2), model)
    with (Path(folder) / "said").open("a", buffering=1, encoding="utf-8") as said:
        for step in run.steps(Sums()):
            for x, y in step.micro_batches:
                step.backward((model(x).squeeze(1) - y).pow(2))
            step.update()
            row = {"step": step.index, "loss": float(step.loss), "rank": run.comm.rank, "world": run.comm.size}
            said.write(json.dumps({**row, "pid": os.getpid()}) + "\n")
            time.sleep(0.0 if (Path(folder) / "hurry").exists() else float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
