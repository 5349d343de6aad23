"""Room: the small training that is killed and restarted, as both programs see it."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH, SAVE_EVERY, LENGTH = 32, 10, 2048
STEPS = int(sys.argv[2])
STEP_S = 0.02
"""Each step waits this long, so that the one who kills can choose where."""


def network() -> nn.Module:
    """A classifier of 64 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def dataset() -> TensorDataset:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(LENGTH, 64, generator=generator), torch.randint(0, 10, (LENGTH,), generator=generator)
    )


def made(step: int) -> None:
    """Tell the one who watches that this step was made: attempt, rank, process, step."""
    words = ("STEP", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], os.getpid(), step)
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # in one piece: ranks share the pipe
    time.sleep(STEP_S)
