"""Room: the example of a job on Slurm: started by srun and by torchrun on two nodes, followed, resumed; and here."""

from __future__ import annotations

import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.examples.programs import PYTHON, ROOT, RUN, call
from tests.testing.slurm import looking
from worldsize.launch import shell
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

EXAMPLE = ROOT / "examples" / "slurm_ddp"
SHORT = ("--epochs", "2", "--data_size", "320", "--save_every", "1")
SMALL = ("--mem", "200M", "--cpus-per-task", "1", "--time", "5", "--env", "OMP_NUM_THREADS=1")


@pytest.mark.slurm
@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.matrix)])
def test_two_nodes_train_as_one(slurm: Cluster, tmp_path: Path, launcher: str) -> None:
    """Both forms of the job: banner, log named after job and id, checkpoints, the model's weights."""
    folder = tmp_path / "slurm_ddp"
    shutil.copytree(EXAMPLE, folder)
    argv = [sys.executable, "-m", "worldsize", "submit", "-c", "job.yaml", "--launcher", launcher, *SMALL, "train.py"]
    done = shell.call([*argv, "--", *SHORT], {**slurm.env, "HOME": str(tmp_path)}, timeout=60, cwd=folder)
    assert done.code == 0, done.err
    job = done.out.strip()
    state, _ = looking.wait(slurm, job, lambda state, _: state in ("COMPLETED", "FAILED"), timeout=120)
    log = (folder / f"train_distributed_{job}.out").read_text(encoding="utf-8")
    assert state == "COMPLETED", log
    for line in (f"Job ID: {job}", "Number of nodes: 2", "Node list: node[1-2]", "World size: 2", "0, 0, node1, cpu",
                 "1, 0, node2, cpu", "Epochs: 2, Batch size: 32, LR: 0.001", "Training completed successfully!"):  # fmt: skip
        assert len(re.findall(rf"^(?:\d+: )?{re.escape(line)}$", log, re.MULTILINE)) == 1, log  # srun may label lines
    run = folder / "runs" / "slurm_ddp"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000005", "step-00000010"]
    weights = torch.load(run / "model_distributed.pt", weights_only=True)
    assert [tuple(value.shape) for value in weights.values()][-2:] == [(4, 64), (4,)]


def test_more_passes_a_step_are_the_same_training_as_more_ranks(tmp_path: Path) -> None:
    """Accumulating twice on one rank is two ranks: losses and validation, each sample counted once."""
    env = {"WORLDSIZE_PRECISION": "fp64"}
    one = call(*PYTHON, EXAMPLE / "train.py", *SHORT, "--accumulate", "2", "--run_dir", "one", cwd=tmp_path, env=env)
    two = call(*RUN, "-n", "2", EXAMPLE / "train.py", *SHORT, "--run_dir", "two", cwd=tmp_path, env=env)
    assert (one.code, two.code) == (0, 0), one.text + two.text
    rows = [read(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    for name in ("loss", "val_loss", "val_accuracy"):
        first, second = (latest(found, name) for found in rows)
        assert first == pytest.approx(second, rel=1e-10)
        assert first
    assert [line for line in one.lines if "Average Loss" in line] == [
        line for line in two.lines if "Average Loss" in line
    ]


def test_mixed_precision_and_debugging(tmp_path: Path) -> None:
    """`--amp` is bf16, in the run's record; `--debug nccl` makes the layers below say what they do."""
    ended = call(*RUN, "-n", "2", "--debug", "nccl", EXAMPLE / "train.py", *SHORT, "--amp", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert '"precision": "bf16"' in (tmp_path / "runs" / "slurm_ddp" / "run.json").read_text(encoding="utf-8")
    assert "Reducer initialized" in ended.text
