"""Every way of starting DeepSpeed's ranks is the same training, by real processes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import PYTHON, ROOT, RUN, STRATEGIES, TORCHRUN, Ended, alone, call, losses, said

if TYPE_CHECKING:
    from worldsize.testing.slurm import Cluster

DOCS = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
WORDS = ("-s", "deepspeed", "--epochs", "2")
LAUNCHER = str(Path(sys.executable).parent / "deepspeed")
WAYS = {
    "deepspeed": (LAUNCHER, "--num_gpus", "2", "train.py", *WORDS, "--deepspeed", "--deepspeed_config", "ds.json"),
    "torchrun": (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py", *WORDS),
    "worldsize run": (
        *RUN,
        "-n",
        "2",
        "--strategy",
        "deepspeed",
        "--deepspeed-config",
        "ds.json",
        "train.py",
        *WORDS,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program and a JSON of DeepSpeed's."""
    found = tmp_path_factory.mktemp("program")
    shutil.copy(ROOT / "examples" / "strategies" / "train.py", found)
    _write(found, {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"})
    return found


def _write(folder: Path, values: dict[str, object]) -> None:
    (folder / "ds.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, float]:
    """What one process gives without DeepSpeed."""
    return alone(folder, *WORDS[2:])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.matrix] if way == "torchrun" else []) for way in WAYS]
)
def test_a_launcher_starts_the_same_training(way: str, folder: Path, expected: dict[int, float]) -> None:
    """DeepSpeed's own, and those that know nothing of it."""
    run = folder / "runs" / way.replace(" ", "-")
    ended = call(*WAYS[way], "--run_dir", run, cwd=folder)
    assert ended.code == 0, ended.text
    assert "strategy deepspeed, 2 ranks" in ended.text
    assert losses(run) == pytest.approx(expected, rel=1e-5)


def test_a_json_that_contradicts_the_run_ends_it_with_both_numbers(tmp_path: Path) -> None:
    """Given by the launcher's option; before any step (B083)."""
    shutil.copy(ROOT / "examples" / "strategies" / "train.py", tmp_path)
    _write(tmp_path, {"train_batch_size": 63})
    ended = call(*WAYS["worldsize run"], "--run_dir", "runs/it", cwd=tmp_path)
    assert ended.code == 2, ended.text
    assert "train_batch_size" in ended.lines[-1]
    assert "63" in ended.lines[-1]
    assert "64" in ended.lines[-1]
    assert "Traceback" not in ended.text


def _on_node1(slurm: Cluster, folder: Path, *words: str) -> Ended:
    """A command on the first of two hosts, which `hosts` names with a rank each."""
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n", encoding="utf-8")
    return call("srun", *words, cwd=folder, env={**slurm.env, "HOME": str(folder)})


def _of_node1(slurm: Cluster) -> str:
    return next(node.address for node in slurm.site.nodes if node.name == "node1")


@pytest.mark.slurm
@pytest.mark.parametrize("way", ["pdsh", "srun", pytest.param("no_ssh", marks=pytest.mark.matrix)])
def test_two_nodes(slurm: Cluster, folder: Path, expected: dict[int, float], way: str) -> None:
    """DeepSpeed's launcher by hostfile and pdsh, or once on each host, in the docs' words; srun needs neither (B086)."""
    run = folder / "runs" / way
    (by_pdsh,) = said(STRATEGIES / "README.md", "--hostfile", "--deepspeed")
    (by_hand,) = (line for line in DOCS.splitlines() if line.startswith("deepspeed --hostfile hosts --no_ssh "))
    number = by_hand.replace("--node_rank 0", "--node_rank $SLURM_NODEID").replace("host0", _of_node1(slurm))
    words = {
        "pdsh": ("-N1", "-wnode1", *by_pdsh.split()),
        "srun": ("-N2", "-n2", *PYTHON, "-u", "train.py", "-s", "deepspeed"),
        "no_ssh": ("-N2", "-n2", "-wnode1,node2", "bash", "-c", f'{number} -s deepspeed "$@"', "bash"),
    }[way]
    ended = _on_node1(slurm, folder, *words, *WORDS[2:], "--run_dir", str(run))
    assert ended.code == 0, ended.text
    assert "strategy deepspeed, 2 ranks" in ended.text
    assert losses(run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slurm
@pytest.mark.matrix
def test_a_rank_that_fails_on_the_other_node_fails_the_launcher(slurm: Cluster, tmp_path: Path) -> None:
    """By hostfile and pdsh, which says where it was; its exit code comes back (B086)."""
    (tmp_path / "train.py").write_text("import os, sys\nsys.exit(3 * int(os.environ['RANK']))\n", encoding="utf-8")
    ended = _on_node1(slurm, tmp_path, "-N1", "-wnode1", LAUNCHER, "--hostfile", "hosts", "train.py")
    assert ended.code == 3, ended.text
    assert "node2: ssh exited with exit code 3" in ended.text
