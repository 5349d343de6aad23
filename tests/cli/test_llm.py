"""`worldsize llm`: the seed's command line, on CPU, under every launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import ROOT
from tests.integration import slurmjob
from tests.launch.container import image
from tests.recipes.llm import folders
from worldsize.launch import env, shell

if TYPE_CHECKING:
    from worldsize.testing.slurm import Cluster

PROGRAM = str(ROOT / "examples" / "llm" / "train.py")
OURS = (sys.executable, "-m", "worldsize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers and a file of JSON lines."""
    found = tmp_path_factory.mktemp("llm")
    folders.folder(found / "tiny", num_hidden_layers=8)
    records = ({"prompt": f"{number}?", "completion": f" {number}"} for number in range(200))
    folders.lines(found / "dataset.train.jsonl", records)
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    (found / "llama.json").write_text(json.dumps(batch))
    return found


def seed_flags(folder: Path, run: Path, *, pipe: int, model: int) -> list[str]:
    """Those of the seed, in its order and spelling."""
    return [
        "--output_dir", str(run), "--init_ckpt", str(folder / "tiny"),
        "--data_path", str(folder / "dataset.train.jsonl"), "--max_seq_len", "128", "--train_steps", "4",
        "--eval_steps", "10", "--save_steps", "1000", "--log_steps", "10", "--pipe_parallel_size", str(pipe),
        "--model_parallel_size", str(model), "--use_flash_attn", "true", "--use_fused_ops", "false",
    ]  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    """Of each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def called(folder: Path, *argv: str) -> Any:
    """The command, in its own home."""
    given = {**env.read(), "HOME": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return shell.call(argv, given, timeout=300, cwd=folder)


EXACT = ("--precision", "fp32", "--cache_dir", "cache")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, float]:
    """What one process does."""
    run = folder / "alone"
    done = called(folder, *OURS, "llm", "train", *seed_flags(folder, run, pipe=1, model=1), *EXACT)
    assert done.code == 0, done.err
    return losses(run)


DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")
STARTS = {
    "deepspeed": (DEEPSPEED, "--num_gpus", "2", "--num_nodes", "1", PROGRAM, "--deepspeed_config", "llama.json"),
    "worldsize": (*OURS, "run", "--nproc-per-node", "2", PROGRAM),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM),
}


@pytest.mark.parametrize(
    "start",
    [
        "deepspeed 2x1",
        "worldsize 1x2",
        *(pytest.param(f"{name} {sizes}", marks=pytest.mark.matrix) for name, sizes in (
            ("deepspeed", "1x2"), ("worldsize", "2x1"), ("torchrun", "2x1"), ("torchrun", "1x2"))),
    ],
)  # fmt: skip
def test_the_seeds_flags(folder: Path, alone: dict[int, float], tmp_path: Path, start: str) -> None:
    """Two stages, or two tensor parts: the curve of one process."""
    launcher, sizes = start.split()
    pipe, model = map(int, sizes.split("x"))
    words = seed_flags(folder, tmp_path / "run", pipe=pipe, model=model)
    done = called(folder, *STARTS[launcher], *words, *EXACT)
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.slurm
@pytest.mark.matrix
@pytest.mark.parametrize("place", ["host", pytest.param("container", marks=pytest.mark.container)])
def test_eight_stages_over_two_nodes(
    slurm: Cluster, folder: Path, alone: dict[int, float], tmp_path: Path, place: str
) -> None:
    """Four ranks on each of two nodes of a real Slurm, one layer a rank (B082); on the nodes or in an image there."""
    words = seed_flags(folder, tmp_path / "run", pipe=8, model=1)
    binds = [*image.binds(), str(folder), str(tmp_path)]
    root = str(image.make(tmp_path / "image"))
    box = {"image": root, "runtime": "charliecloud", "python": sys.executable, "binds": binds}
    (tmp_path / "job.yaml").write_text(json.dumps({"container": box} if place == "container" else {}))
    options = ("--nodes", "2", "--nproc-per-node", "4", "--launcher", "torchrun", "--chdir", str(folder))
    places = ("--job-dir", str(tmp_path / "job"), "--env", "OMP_NUM_THREADS=1")
    argv = (*OURS, "submit", "-c", str(tmp_path / "job.yaml"), PROGRAM, *options, *places, "--", *words, *EXACT)
    done = shell.call(argv, {**slurm.env, "HOME": str(tmp_path)}, timeout=120, cwd=folder)
    assert done.code == 0, done.err
    job = slurmjob.Job(slurm, done.out.strip(), tmp_path / "job", tmp_path / "run")
    assert job.ends() == "COMPLETED", job.log
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


def test_dashes_yaml_and_options_are_one_definition(folder: Path, alone: dict[int, float], tmp_path: Path) -> None:
    """The file has the same names; options win; `-` and `_` are alike."""
    words = seed_flags(folder, tmp_path / "run", pipe=1, model=1)
    pairs = zip(words[::2], words[1::2], strict=True)
    file = tmp_path / "llm.yaml"
    file.write_text("".join(f"{name.removeprefix('--')}: {value}\n" for name, value in pairs) + "precision: fp64\n")
    done = called(folder, *OURS, "llm", "train", "-c", str(file), "--precision", "fp32", "--cache-dir", "cache")
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--train_steps", "2"), "--output_dir is missing"),
        (("--use_flash_attn", "maybe"), "use_flash_attn"),
        (("--train_steps", "2", "--epochs", "1"), "train_steps and epochs exclude each other. Found: 2 and 1"),
        (("--output_dir", "a", "--init_ckpt", "none", "--data_path", "d"), "none is no folder of a model"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, words: tuple[str, ...], found: str) -> None:
    """What was set, what was found, what to do; code 2."""
    done = called(tmp_path, *OURS, "llm", "train", *words)
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert found in done.err


def test_a_rank_says_it_once(folder: Path, tmp_path: Path) -> None:
    """A data file with a bad line: one line with file, line and column, whichever rank came first (B076)."""
    path = folders.lines(tmp_path / "bad.jsonl", [{"text": "a"}])
    path.write_text(path.read_text() + '{"text": "b\n')
    words = (*seed_flags(folder, tmp_path / "run", pipe=1, model=1), "--data_path", str(path))
    done = called(folder, *STARTS["worldsize"], *words, *EXACT)
    assert done.code == 1
    assert "bad.jsonl:2:" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
