"""The proofs of `worldsize verify`, on programs of one's own."""

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


FORGETS = (
    PROGRAM.replace("for step in", "own = 1.0\nfor step in").replace("model(x)", "own * model(x)")
    + "    own *= 0.5\n"
)


def verify(folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command's end for this program, with its trials in `trials`."""
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "worldsize", "verify", *words, "--keep", "trials", "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_program_that_resumes_exactly_is_told_so(tmp_path: Path) -> None:
    """Interrupted on one process, it goes on there and on two, with the straight run's losses and weights."""
    done = verify(tmp_path, PROGRAM, "resume", "--at", "2", "--layouts", "single,ddp:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped after 2, resumed on single:1 " in done.stdout
    assert "stopped after 2, resumed on ddp:2 " in done.stdout
    assert "all 2 agree" in done.stdout


def test_a_program_that_does_not_resume_exactly_is_found_out(tmp_path: Path) -> None:
    """It keeps a number of its own that no checkpoint has: the first step that differs is named, and the exit code is 1."""
    done = verify(tmp_path, FORGETS, "resume", "--at", "2", "--layouts", "single")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "first difference at step 2: loss is " in done.stdout
    assert "1 of 1 differ" in done.stdout


def test_shards_train_the_curve_of_one_process(tmp_path: Path) -> None:
    """Parity of fsdp on two ranks, to the bound of float64."""
    done = verify(tmp_path, PROGRAM, "parity", "--layouts", "single,fsdp:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fsdp:2 against single:1 " in done.stdout
    assert "all 1 agree (largest relative difference allowed: 1e-10)" in done.stdout


def test_every_pair_stands_in_the_table_and_one_that_cannot_says_why(tmp_path: Path) -> None:
    """What one process wrote, it goes on with; under tensor parallel the model has no plan."""
    done = verify(tmp_path, PROGRAM, "matrix", "--layouts", "single,tp2:2", "--writers", "single", "--at", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| 1 `single:1` | 0 | differs |" in done.stdout
    assert "single:1 stopped after 2, resumed on tp2:2: final weights: the run is " in done.stdout
    assert "1 of 2 differ" in done.stdout
    assert "tp_plan" in done.stdout
