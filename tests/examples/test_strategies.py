"""Room: the example of one program under several strategies: the builder's file, a site's profile, interactive forms."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import ROOT
from tests.testing.slurm import looking
from worldsize.launch import shell
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

GENERATE = (sys.executable, "-m", "worldsize", "generate-slurm", "-c", "slurm_config.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example."""
    return shutil.copytree(ROOT / "examples" / "strategies", tmp_path / "strategies")


def test_the_site_is_in_the_script_and_not_in_the_builders_file(folder: Path) -> None:
    """Modules, then the environment; GPUs asked for once, in the site's form; the fast network's names."""
    argv = [*GENERATE, "--no-save-script", "--no-submit-job", "--profile", "profile.yaml"]
    text = shell.call(argv, {"PATH": "/nowhere"}, timeout=60, cwd=folder).out
    assert [line for line in text.splitlines() if "gpu" in line] == [
        "#SBATCH --gres=gpu:4",
    ]
    assert "  -- train.py -s ddp --run_dir runs/ddp-2x4 &\n" in text
    assert (
        text.index("module load Stages/2024")
        < text.index("module load mpi4py")
        < text.index("envAI_hdfml/bin/activate")
    )
    assert "--address-suffix=i" in text
    assert f"{folder}/envAI_hdfml/bin/python -m worldsize node" in text


def test_runall_is_a_script_for_each_strategy(folder: Path) -> None:
    """Each with its launcher."""
    argv = [*GENERATE, "--no-save-script", "--no-submit-job", "--mode", "runall"]
    text = shell.call(argv, {"PATH": "/nowhere"}, timeout=60, cwd=folder).out
    assert [text.count(f"--launcher={name} ") for name in ("torchrun", "srun", "deepspeed")] == [1, 1, 1]


@pytest.mark.slurm
def test_batch_and_interactive_forms_are_one_training(slurm: Cluster, folder: Path) -> None:
    """The builder's job on two nodes, and inside allocations the launcher and srun alone, under two strategies."""
    options = ("--partition", "main", "--num-nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1", "--memory", "200M",
               "--python-venv", "", "--training-cmd", "train.py -s fsdp --epochs 2 --run_dir runs/batch")  # fmt: skip
    env = {**slurm.env, "HOME": str(folder)}
    done = shell.call([*GENERATE, "--no-save-script", *options], env, timeout=60, cwd=folder)
    assert done.code == 0, done.err
    train = ("train.py", "-s", "ddp", "--epochs", "2", "--run_dir")
    run = (sys.executable, "-m", "worldsize", "run", "-n", "2")
    forms = {
        "launcher": ("-n1", *run, *train, "runs/launcher"),
        "srun": ("-n2", sys.executable, "-u", *train, "runs/srun"),
    }
    for words in forms.values():
        ended = shell.call(["srun", "-N1", *words], env | {"OMP_NUM_THREADS": "1"}, timeout=120, cwd=folder)
        assert ended.code == 0, ended.err
    assert (
        looking.wait(slurm, done.out.strip(), lambda state, _: state in ("COMPLETED", "FAILED"), 120)[0]
        == "COMPLETED"
    )
    losses = {name: latest(read(folder / "runs" / name / "metrics.jsonl"), "loss") for name in ("batch", *forms)}
    assert len(losses["batch"]) == 20
    assert losses["launcher"] == losses["srun"]
    assert losses["batch"] == pytest.approx(losses["srun"], rel=1e-5)
