"""Room: the example of a small language model from nothing, on the source of Python's standard library."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import ROOT, call
from tests.integration import slurmjob
from tests.launch.container import image
from worldsize.launch import env, shell, yamlfile

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

EXAMPLE = ROOT / "examples" / "llm"
OURS = (sys.executable, "-m", "worldsize")


def called(folder: Path, *argv: str) -> Any:
    """A command in the folder, which is its home too."""
    given = {**env.read(), "HOME": str(folder), "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = shell.call(argv, given, timeout=1500, cwd=folder)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared."""
    place = tmp_path_factory.mktemp("stdlib")
    called(place, sys.executable, str(EXAMPLE / "stdlib.py"), "prepare", "work")
    return place


def test_what_is_prepared_trains(folder: Path) -> None:
    """Tokenizer, shape and text of this machine's Python: a step, and the next one."""
    words = ("--train_steps", "2", "--eval_steps", "0", "--output_dir", "work/runs/short")
    called(folder, *OURS, "llm", "train", "-c", "work/pretrain.yaml", *words)
    rows = [json.loads(line) for line in (folder / "work/runs/short/metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in row for row in rows) == 2


@pytest.mark.matrix
@pytest.mark.timeout(2400)
def test_it_learns_and_goes_on_from_its_own_folder(folder: Path) -> None:
    """Perplexity on kept files below half of what counts of single tokens give; then docstrings from function heads."""
    called(folder, *OURS, "llm", "train", "-c", "work/pretrain.yaml")
    said = called(folder, sys.executable, str(EXAMPLE / "stdlib.py"), "score", "work").out
    trained, counted = (float(word.rstrip(";")) for word in said.split() if word[0].isdigit())
    assert trained < counted / 2, said
    called(folder, *OURS, "llm", "export", "work/runs/pretrain", "work/pretrained", "--dtype", "fp32")
    called(folder, *OURS, "llm", "train", "-c", "work/finetune.yaml")
    rows = [json.loads(line) for line in (folder / "work/runs/finetune/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    text = called(folder, *OURS, "llm", "generate", "work/runs/finetune", "def close(self):\n", "--tokens", "24").out
    assert text.strip()


SHORT = ("--train_steps", "2", "--eval_steps", "0", "--cache_dir", "work/cache")


@pytest.fixture
def project(folder: Path) -> Path:
    """The folder with the program and its hosts."""
    for name in ("train.py", "hosts"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def losses(run: Path) -> dict[int, float]:
    """Of each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture
def alone(project: Path) -> dict[int, float]:
    """What one process does."""
    run = project / "work/runs/alone"
    if not run.exists():
        called(project, *OURS, "llm", "train", "-c", "work/pretrain.yaml", *SHORT, "--output_dir", str(run))
    return losses(run)


@pytest.mark.slurm
@pytest.mark.matrix
def test_it_is_one_training_by_hostfile_and_pdsh(slurm: Cluster, project: Path, alone: dict[int, float]) -> None:
    """The README's line, on two hosts: the curve of one process."""
    lines = (EXAMPLE / "README.md").read_text(encoding="utf-8").splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("worldsize run --hostfile")))[2:]
    argv = (*OURS, "run", "--ssh-args", f"-F {slurm.ssh_config}", *words, *SHORT, "--output_dir", "work/runs/pdsh")
    ended = call(*argv, cwd=project, env={"PYTHONPATH": str(ROOT / "src")})
    assert ended.code == 0, ended.text
    assert losses(project / "work/runs/pdsh") == pytest.approx(alone, rel=1e-5)


@pytest.mark.slurm
@pytest.mark.container
@pytest.mark.matrix
def test_it_is_one_training_as_a_job_in_a_container(
    slurm: Cluster, project: Path, alone: dict[int, float], tmp_path: Path
) -> None:
    """The spec with this cluster's words in the place of the site's, on two nodes: the curve of one process."""
    text = (EXAMPLE / "stdlib.yaml").read_text(encoding="utf-8").replace("/path/to/project", str(project))
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    spec = yamlfile.load(tmp_path / "spec.yaml")
    del spec["account"], spec["partition"]
    box = spec["container"]
    box |= {"image": str(image.make(tmp_path / "image")), "runtime": "charliecloud", "python": sys.executable}
    box["binds"] += image.binds()
    spec["program"] += [*SHORT, "--output_dir", "work/runs/slurm"]
    (tmp_path / "spec.yaml").write_text(json.dumps(spec), encoding="utf-8")
    argv = (*OURS, "submit", "-c", str(tmp_path / "spec.yaml"), "--job-dir", str(tmp_path / "job"))
    done = shell.call(argv, {**slurm.env, "HOME": str(tmp_path)}, timeout=120, cwd=project)
    assert done.code == 0, done.err
    job = slurmjob.Job(slurm, done.out.strip(), tmp_path / "job", project / "work/runs/slurm")
    assert job.ends() == "COMPLETED", [path.read_text() for path in (project / "logs").glob("*.out")]
    assert losses(job.run) == pytest.approx(alone, rel=1e-5)
