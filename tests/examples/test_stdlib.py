"""Room: the example of a small language model from nothing, on the source of Python's standard library."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import ROOT
from worldsize.launch import env, shell

if TYPE_CHECKING:
    from pathlib import Path

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
