"""`worldsize scale` and `worldsize bench` on a real program."""

from __future__ import annotations

import csv
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.programs import ROOT

from worldsize.launch import env, shell

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

SCRIPT = str(ROOT / "examples" / "digits" / "train.py")
OURS = (sys.executable, "-m", "worldsize")


def called(folder: Path, *words: str, environ: dict[str, str] | None = None) -> Any:
    """The command, in a folder of its own."""
    given = {**env.read(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environ or {})}
    return shell.call((*OURS, *words), given, timeout=280, cwd=folder)


def rows(folder: Path) -> list[dict[str, str]]:
    """Of the CSV."""
    return list(csv.DictReader((folder / "scale.csv").read_text(encoding="utf-8").splitlines()))


def test_one_program_on_one_and_two_ranks(tmp_path: Path) -> None:
    """With --weak the second has twice the samples a step; the table is printed, CSV and picture are written."""
    done = called(tmp_path, "scale", "--ranks", "2,1", "--weak", "--duration", "60st", SCRIPT, "unused")
    assert done.code == 0, done.err
    one, two = rows(tmp_path / "scale")
    assert (one["ranks"], one["speedup"], one["efficiency"]) == ("1", "1.0", "1.0")
    assert two["ranks"] == "2"
    assert float(two["efficiency"]) == pytest.approx(float(two["speedup"]) / 2)
    batches = [
        json.loads(path.read_text())["config"]["global_batch"]
        for path in sorted((tmp_path / "scale").glob("*/run.json"))
    ]
    assert batches == [64, 128]
    assert done.out.splitlines()[0].split()[:2] == ["strategy", "ranks"]
    assert (tmp_path / "scale" / "scale.svg").is_file()
    assert not (tmp_path / "unused").exists()


def test_bench_is_one_line(tmp_path: Path) -> None:
    """And leaves nothing."""
    done = called(tmp_path, "bench", "--duration", "60st", SCRIPT, "unused")
    assert done.code == 0, done.err
    assert re.fullmatch(r"[\d,.]+ samples/s on 1 rank, .* ms a step .*, waiting \d+%\n", done.out), done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "1,x"), "--ranks 1,x"),
        ((), "where shall it be measured?"),
        (("--ranks", "1", "--nodes", "1"), "where shall it be measured?"),
        (("--ranks", "1", "--out", "."), ". is there already"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    """Before anything is started."""
    done = called(tmp_path, "scale", *words, SCRIPT, "unused")
    assert done.code == 2
    assert says in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.slurm
@pytest.mark.matrix
def test_on_nodes_of_a_queue(slurm: Cluster, tmp_path: Path) -> None:
    """A job a size, from a job file."""
    (tmp_path / "job.yaml").write_text(json.dumps({"nproc_per_node": 1, "env": {"OMP_NUM_THREADS": "1"}}))
    words = ("--nodes", "1,2", "-c", "job.yaml", "--strategies", "ddp", "--duration", "120st")
    done = called(tmp_path, "scale", *words, SCRIPT, "unused", environ={**slurm.env, "HOME": str(tmp_path)})
    assert done.code == 0, done.err
    assert [(row["nodes"], row["ranks"], row["strategy"]) for row in rows(tmp_path / "scale")] == [
        ("1", "1", "ddp"), ("2", "2", "ddp")
    ]  # fmt: skip
