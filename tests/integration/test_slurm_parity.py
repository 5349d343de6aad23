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


@pytest.mark.parametrize(
    ("launcher", "strategy", "ranks"),
    [
        pytest.param("deepspeed", "zero2", 1, id="deepspeed"),
        pytest.param("deepspeed", "zero3", 2, marks=pytest.mark.matrix, id="deepspeed-4"),
        pytest.param("srun", "zero1", 2, marks=pytest.mark.matrix, id="deepspeed-srun-4"),
        pytest.param("srun", "horovod", 1, marks=pytest.mark.horovod, id="horovod-srun"),
        pytest.param("srun", "horovod", 2, marks=[pytest.mark.horovod, pytest.mark.matrix], id="horovod-srun-4"),
        pytest.param("horovodrun", "horovod", 2, marks=[pytest.mark.horovod, pytest.mark.matrix], id="horovodrun-4"),
    ],
)
def test_engines_on_two_nodes_train_as_one_process(
    slurm: Cluster, tmp_path: Path, launcher: str, strategy: str, ranks: int
) -> None:
    """By the engine's own launcher, where horovodrun reaches the second node by ssh, and by one task a rank."""
    said = f"--nodes=2 --nproc-per-node={ranks} --launcher={launcher} --env=WORLDSIZE_STRATEGY={strategy}"
    job = slurmjob.submit(slurm, tmp_path, PROGRAM, tuple(said.split()), WORDS)
    assert job.ends() == "COMPLETED", job.log
    slurmjob.same(job.losses(), slurmjob.alone(PROGRAM, *WORDS))


def test_a_rank_that_fails_on_the_second_node_fails_deepspeeds_job(slurm: Cluster, tmp_path: Path) -> None:
    """Its launcher there says it, and no end of it as a success on the first node hides that (B086)."""
    program = tmp_path / "fails.py"
    program.write_text("import os, sys\nsys.exit(3 * int(os.environ['RANK']))\n", encoding="utf-8")
    options = ("--nodes=2", "--nproc-per-node=1", "--launcher=deepspeed")
    job = slurmjob.submit(slurm, tmp_path, program, options, ())
    assert job.ends() == "FAILED", job.log


TEMPLATE = (
    "torchrun --nproc-per-node 2 --nnodes {num_machines} --node-rank {machine_rank} "
    "--master-addr {main_process_ip} --master-port {main_process_port}"
)
