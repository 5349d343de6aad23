"""Every way of starting Horovod's ranks on one machine is the same training, by real processes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import PYTHON, RUN, STRATEGIES, TORCHRUN, Ended, alone, call, losses, said

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.horovod

WORDS = ("--epochs", "2")
README = STRATEGIES / "README.md"
WAYS = [line for word in ("horovodrun", "mpirun") for line in said(README, word) if not line.startswith("srun")]
"""The README's very words."""
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
"""As root, and with more ranks than cores."""
OTHERS = {
    "torchrun": (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py"),
    "worldsize run": (*RUN, "-n", "2", "--strategy", "horovod", "train.py"),
    "one process": (*PYTHON, "train.py"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as it lies in the checkout."""
    return shutil.copytree(STRATEGIES, tmp_path_factory.mktemp("program") / "strategies")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, float]:
    """What one process gives without Horovod."""
    return alone(folder, *WORDS)


def test_the_readme_says_all_forms() -> None:
    """With `python` before the script and without, by a path and by the PATH, and mpirun: they are run below."""
    assert [line.split(" -s ")[0] for line in WAYS] == [
        "horovodrun -np 2 -H localhost:2 python -u train.py",
        "horovodrun -np 2 -H localhost:2 ./train.py",
        "PATH=$PWD:$PATH horovodrun -np 2 -H localhost:2 train.py",
        "mpirun -np 2 python -u train.py",
    ]


def _marks(line: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.mpirun] if "mpirun" in line else [pytest.mark.matrix] if "PATH" in line else []


@pytest.mark.parametrize("line", [pytest.param(line, marks=_marks(line)) for line in WAYS])
def test_the_words_of_the_readme_start_the_training(line: str, folder: Path, expected: dict[int, float]) -> None:
    """By Horovod's own command, as it lies in the environment, and by Open MPI's, over gloo or over what is built."""
    run = folder / "runs" / str(WAYS.index(line))
    ended = call("bash", "-ec", f"{line} {' '.join(WORDS)} --run_dir {run}", cwd=folder, env=MPI)
    _is_it(ended, 2, run, expected)


@pytest.mark.parametrize("way", OTHERS)
def test_a_launcher_starts_the_same_training(way: str, folder: Path, expected: dict[int, float]) -> None:
    """Those that know nothing of Horovod."""
    run = folder / "runs" / way.replace(" ", "-")
    ended = call(*OTHERS[way], "-s", "horovod", *WORDS, "--run_dir", run, cwd=folder)
    _is_it(ended, 1 if way == "one process" else 2, run, expected)


def _is_it(ended: Ended, ranks: int, run: Path, expected: dict[int, float]) -> None:
    assert ended.code == 0, ended.text
    assert f"strategy horovod, {ranks} ranks" in ended.text
    assert losses(run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.mpirun
def test_a_controller_that_is_not_built_is_said_under_mpirun(folder: Path) -> None:
    """In a line of each rank; Horovod itself would end in a segmentation fault."""
    words = ("-np", "2", *PYTHON, "train.py", "-s", "horovod", "--run_dir", "runs/none")
    ended = call("mpirun", *words, cwd=folder, env=MPI | {"HOROVOD_CONTROLLER": "none"})
    assert ended.code == 2, ended.text
    assert "worldsize: Horovod is built without what HOROVOD_CONTROLLER=none asks for" in ended.text
    assert "Traceback" not in ended.text


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
