"""`worldsize llm`: the seed's command line, on CPU, under every launcher."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import ROOT
from tests.recipes.llm import folders
from worldsize.launch import env, shell

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = str(ROOT / "examples" / "llm" / "train.py")
OURS = (sys.executable, "-m", "worldsize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers and a file of JSON lines."""
    found = tmp_path_factory.mktemp("llm")
    folders.folder(found / "tiny", num_hidden_layers=8)
    records = ({"prompt": f"{number}?", "completion": f" {number}"} for number in range(200))
    folders.lines(found / "dataset.train.jsonl", records)
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


STARTS = {
    "worldsize": (*OURS, "run", "--nproc-per-node", "2", PROGRAM),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM),
}


@pytest.mark.parametrize("start", ["worldsize 2x1", pytest.param("torchrun 1x2", marks=pytest.mark.matrix)])
def test_the_seeds_flags(folder: Path, alone: dict[int, float], tmp_path: Path, start: str) -> None:
    """Two stages, or two tensor parts: the curve of one process."""
    launcher, sizes = start.split()
    pipe, model = map(int, sizes.split("x"))
    words = seed_flags(folder, tmp_path / "run", pipe=pipe, model=model)
    done = called(folder, *STARTS[launcher], *words, *EXACT)
    assert done.code == 0, done.err
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
