"""The table of pairs of layouts, on a program of one's own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import torch
import worldsize as ws

run = ws.Run("runs/one", global_batch=8, micro_batch=4, duration="4st")
model = run.model(lambda: torch.nn.Linear(3, 1))
run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 0.1), model)
for step in run.steps(torch.utils.data.TensorDataset(torch.arange(48.0).view(16, 3))):
    for (x,) in step.micro_batches:
        step.backward(model(x).square().flatten())
    step.update()
"""


def test_every_pair_stands_in_the_table_and_one_that_cannot_says_why(tmp_path: Path) -> None:
    """What one process wrote, it goes on with; under tensor parallel the model has no plan."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "worldsize",
        "verify",
        "matrix",
        "--layouts",
        "single,tp2:2",
        "--writers",
        "single",
    ]
    done = subprocess.run(
        [*command, "--at", "2", "--keep", "trials", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| 1 `single:1` | 0 | differs |" in done.stdout
    assert "single:1 stopped after 2, resumed on tp2:2: final weights: the run is " in done.stdout
    assert "1 of 2 differ" in done.stdout
    assert "tp_plan" in done.stdout
