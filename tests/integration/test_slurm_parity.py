"""Every way of starting ranks on two nodes of a real Slurm trains the digits as one process does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration import slurmjob

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

pytestmark = pytest.mark.slurm

PROGRAM = slurmjob.HERE.parents[1] / "examples" / "digits" / "train.py"
WORDS = ("--duration", "2ep", "--precision", "fp64")
DAILY = (("worldsize", "fsdp"), ("srun", "ddp"))


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        pytest.param(launcher, strategy, marks=() if (launcher, strategy) in DAILY else pytest.mark.matrix)
        for launcher in ("worldsize", "srun", "torchrun", "accelerate", "template")
        for strategy in ("fsdp", "ddp")
    ],
)
def test_two_nodes_of_two_ranks_train_as_one_process(
    slurm: Cluster, tmp_path: Path, launcher: str, strategy: str
) -> None:
    """The same loss at every step, in float64."""
    options = [
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--launcher",
        launcher,
        "--env",
        f"WORLDSIZE_STRATEGY={strategy}",
    ]
    if launcher == "template":
        options += ["--command", TEMPLATE]
    job = slurmjob.submit(slurm, tmp_path, PROGRAM, tuple(options), WORDS)
    assert job.ends() == "COMPLETED", job.log
    slurmjob.same(job.losses(), slurmjob.alone(PROGRAM, *WORDS))


@pytest.mark.horovod
@pytest.mark.matrix
@pytest.mark.parametrize("launcher", ["horovodrun", "srun"])
def test_horovod_on_two_nodes_trains_as_one_process(slurm: Cluster, tmp_path: Path, launcher: str) -> None:
    """By its own launcher, which reaches the second node by ssh, and by one task a rank."""
    options = ("--nodes", "2", "--nproc-per-node", "2", "--launcher", launcher, "--env", "WORLDSIZE_STRATEGY=horovod")
    job = slurmjob.submit(slurm, tmp_path, PROGRAM, options, WORDS)
    assert job.ends() == "COMPLETED", job.log
    slurmjob.same(job.losses(), slurmjob.alone(PROGRAM, *WORDS))


TEMPLATE = (
    "torchrun --nproc-per-node 2 --nnodes {num_machines} --node-rank {machine_rank} "
    "--master-addr {main_process_ip} --master-port {main_process_port}"
)
