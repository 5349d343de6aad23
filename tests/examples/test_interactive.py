"""Interactive forms of the strategies' README, inside an allocation of a real Slurm and from outside of it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import STRATEGIES, environment, losses, said
from worldsize.launch import shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.testing.slurm import Cluster

pytestmark = pytest.mark.slurm

README = STRATEGIES / "README.md"
ENTER = said(README, "--overlap")[0]
LOADS = [line for word in ("ml", "source") for line in said(README, word)]
INSIDE = [line for line in said(README, "train.py") if line.split()[0] in ("worldsize", "torchrun", "deepspeed")]
INSIDE = [line for line in INSIDE if "--hostfile" not in line]
OUTSIDE = [line for line in said(README, "srun", "train.py") if line.startswith("srun --jobid")]
HOROVOD = [line for line in said(README, "horovodrun") if line.startswith("horovodrun")]
DAILY = (INSIDE[1], OUTSIDE[4])


def _each(*lines: str) -> list[object]:
    """A name for each form, and what it needs."""
    return [
        pytest.param(
            line,
            id=re.sub(r"\W+", "-", line.split(" -s ")[0])[-60:],
            marks=([] if line in DAILY else [pytest.mark.matrix])
            + ([pytest.mark.horovod] if "-s horovod" in line else []),
        )
        for line in lines
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example, with the environment where the README has it."""
    found = shutil.copytree(STRATEGIES, tmp_path / "strategies")
    (found / "envAI_hdfml").symlink_to(Path(sys.executable).parents[1])
    return found


@pytest.fixture
def env(slurm: Cluster, folder: Path) -> dict[str, str]:
    """A user's at the login node."""
    return environment({**slurm.env, "HOME": str(folder)})


@pytest.fixture
def job(slurm: Cluster, env: dict[str, str], folder: Path) -> Iterator[str]:
    """The README's allocation: a whole node of the partition that is there."""
    words = said(README, "salloc")[0].replace("develbooster", "main").split()
    done = shell.call([*words, "--exclusive", "--no-shell"], env, timeout=60, cwd=folder)
    found = re.search(r"Granted job allocation (\d+)", done.err)
    assert found is not None, done.err
    yield found[1]
    slurm.run(["scancel", found[1]])


def _here(line: str, job: str, name: str) -> str:
    """The line for this job and a machine of few cores whose GPUs are pretended: two ranks.

    DeepSpeed takes as many as CUDA_VISIBLE_DEVICES names, but finds one device where there is no GPU: one rank.
    """
    line = re.sub(r"(?<=[ =])gpu(?= )", "2", line.replace("123", job))
    line = line.replace("deepspeed train.py", "env CUDA_VISIBLE_DEVICES=0 deepspeed train.py")
    line = re.sub(r"(ntasks|per-node)=4", r"\1=2", line)
    return f"{line} --epochs 1 --run_dir runs/{name}"


@pytest.mark.parametrize("line", _each(*INSIDE, *HOROVOD))
def test_in_a_shell_of_the_allocation(line: str, env: dict[str, str], job: str, folder: Path) -> None:
    """`srun --overlap --pty` gives a shell with a terminal on the node, and the launcher trains in it."""
    typed = ("set -e", "ml() { :; }", "hostname", *LOADS, _here(line, job, "it"), "exit", "")
    terminal = ("script", "--quiet", "--return", "--command", ENTER.replace("123", job), "/dev/null")
    ended = shell.call(terminal, env, timeout=200, cwd=folder, text="\n".join(typed))
    assert ended.code == 0, ended.out
    assert re.search(r"node\d\s*$", ended.out, re.MULTILINE), ended.out
    assert len(losses(folder / "runs" / "it")) == 10


@pytest.mark.parametrize("line", _each(*OUTSIDE))
def test_from_the_login_node(line: str, env: dict[str, str], job: str, folder: Path) -> None:
    """Into an allocation that stands, by its number."""
    ended = shell.call(["bash", "-c", _here(line, job, "it")], env, timeout=200, cwd=folder)
    assert ended.code == 0, ended.out + ended.err
    assert len(losses(folder / "runs" / "it")) == 10
