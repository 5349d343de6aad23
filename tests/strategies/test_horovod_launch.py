"""Every way of starting Horovod's ranks on one machine is the same training, by real processes."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import PYTHON, ROOT, RUN, TORCHRUN, alone, call, finish, losses, start
from worldsize.launch import ports

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.horovod

WORDS = ("-s", "horovod", "--epochs", "2")
HOROVODRUN = (*PYTHON, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2")
WAYS = {
    "horovodrun python": (*HOROVODRUN, "python", "train.py"),
    "horovodrun": (*HOROVODRUN, "./train.py"),
    "torchrun": (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py"),
    "worldsize run": (*RUN, "-n", "2", "--strategy", "horovod", "train.py"),
    "one process": (*PYTHON, "train.py"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, which can be executed by its name."""
    found = tmp_path_factory.mktemp("program")
    script = found / "train.py"
    text = (ROOT / "examples" / "strategies" / "train.py").read_text(encoding="utf-8")
    script.write_text(f"#!/usr/bin/env python\n{text}", encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, float]:
    """What one process gives without Horovod."""
    return alone(folder, *WORDS[2:])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.matrix] if way == "torchrun" else []) for way in WAYS]
)
def test_a_launcher_starts_the_same_training(way: str, folder: Path, expected: dict[int, float]) -> None:
    """With `python` before the script and without; Horovod's own launcher and those that know nothing of it."""
    run = folder / "runs" / way.replace(" ", "-")
    ended = call(*WAYS[way], *WORDS, "--run_dir", run, cwd=folder)
    assert ended.code == 0, ended.text
    assert f"strategy horovod, {1 if way == 'one process' else 2} ranks" in ended.text
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def test_as_mpirun_starts_it(folder: Path, expected: dict[int, float]) -> None:
    """Ranks that know of each other by Open MPI's variables alone meet over gloo, where MPI itself is not asked for."""
    run = folder / "runs" / "mpi"
    with ports.reserve() as port:
        meeting = {"MASTER_PORT": str(port.getsockname()[1]), "HOROVOD_CONTROLLER": "gloo"}
        ranks = [
            start(*PYTHON, "train.py", *WORDS, "--run_dir", run, cwd=folder, env=meeting | _openmpi(rank, 2))
            for rank in range(2)
        ]
        try:
            ended = [finish(process) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [each.code for each in ended] == [0, 0], ended
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def _openmpi(rank: int, size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}


def test_a_rank_that_is_killed_ends_the_others(folder: Path) -> None:
    """Within seconds, and the line is the killed rank's, not that of those who missed it."""
    (folder / "dies.py").write_text(DIES, encoding="utf-8")
    ended = call(*RUN, "-n", "2", "dies.py", cwd=folder)
    assert ended.code == 137, ended.text
    assert ended.text.splitlines()[-1].startswith("worldsize: rank 1 of 2"), ended.text
    assert "killed by SIGKILL" in ended.text


DIES = """
import os, signal, torch, worldsize as ws
run = ws.Run("runs/dies", global_batch=8, micro_batch=2, duration="1000ep", strategy="horovod")
model = run.model(lambda: torch.nn.Linear(4, 1))
run.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3), model)
for step in run.steps(torch.utils.data.TensorDataset(torch.ones(64, 4))):
    for (x,) in step.micro_batches:
        if step.index == 5 and ws.here().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step.backward(model(x).square().sum(1))
    step.update()
"""
