"""Every layout on two and four GPUs is the training of one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.gpu.conftest import DEVICE, ROOT, environment
from tests.integration.program import ranks_of
from tests.integration.stack import ONE

PROGRAM = Path(__file__).parent / "engines.py"
TWO = (
    "fsdp:2",
    "zero1:2",
    "zero2:2",
    "zero3:2",
    "tp2:2",
    "pp2+schedule=1f1b:2",
    "pp2+schedule=interleavedzerobubble:2",
    "horovod:2",
)
FOUR = ("hsdp+replicas2:4", "tp2+pp2:4", "fsdp+tp2:4", "fsdp+pp2:4")
CHAIN = ("ddp:2", "zero3:2", "tp2:2", "pp2+schedule=1f1b:2", ONE)
PLAN = {1: (ONE, f"{ONE},bf16"), 2: (*TWO, *(f"{layout},bf16" for layout in TWO)), 4: FOUR}
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}


@cache
def answers(ranks: int) -> dict[str, Any]:
    """What one start of so many ranks saw, by what was asked."""
    asked = PLAN[ranks]
    return dict(zip(asked, start(Path(mkdtemp()), ranks, asked), strict=True))


def start(folder: Path, ranks: int, asked: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the program left of each."""
    launcher = [sys.executable, "-m", "worldsize", "run", "--nproc-per-node", str(ranks), "--device", DEVICE]
    done = subprocess.run([*launcher, str(PROGRAM), str(folder), *asked], env=environment(PYTHONPATH=_path()),
                          capture_output=True, text=True, timeout=400, check=False)  # fmt: skip
    files = [folder / f"{number}.json" for number in range(len(asked))]
    missing = {"error": f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"}
    return [json.loads(file.read_text()) if file.exists() else missing for file in files]


def _path() -> str:
    return f"{ROOT}:{environment()['PYTHONPATH']}"


def seen(ranks: int, what: str) -> dict[str, Any]:
    """Losses and norms by step; fails the test where the run failed."""
    answer = answers(ranks)[what]
    if "error" in answer:
        pytest.fail(answer["error"], pytrace=False)
    found: dict[str, Any] = answer
    return found


def close(what: str, ranks: int, precision: str) -> None:
    """Losses and gradient norms are those of one GPU."""
    reference = seen(1, ONE if precision == "fp32" else f"{ONE},{precision}")
    found = seen(ranks, what)
    for number in ("loss", "norm"):
        for step, value in reference[number].items():
            assert found[number][step] == pytest.approx(value, rel=BOUNDS[precision]), f"{number} of step {step}"


def here(layout: str) -> Any:
    """Skipped by its engine's absence alone."""
    engine = "horovod" if layout.startswith("horovod") else "deepspeed" if layout.startswith("zero") else "torch"
    there = importlib.util.find_spec(engine) is not None
    return pytest.param(layout, marks=pytest.mark.skipif(not there, reason=f"needs {engine}: make engines"))


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [here(each) for each in TWO])
def test_two_gpus_train_as_one(layout: str, precision: str) -> None:
    """Ten steps, with a ragged one."""
    close(layout if precision == "fp32" else f"{layout},{precision}", 2, precision)


@pytest.mark.gpu(count=4)
@pytest.mark.parametrize("layout", FOUR)
def test_four_gpus_train_as_one(layout: str) -> None:
    """Two axes at once."""
    close(layout, 4, "fp32")


@pytest.mark.gpu(count=2)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: make engines")
def test_a_run_is_handed_from_engine_to_engine(tmp_path: Path) -> None:
    """ddp, ZeRO-3, tensor and pipeline parallel, and one GPU take it up after two steps each."""
    found: dict[str, float] = {}
    for place, layout in enumerate(CHAIN):
        stop = "" if layout == ONE else str(2 * (place + 1))
        answer = start(tmp_path, ranks_of(layout), (f"{layout},fp32,{stop}",))[0]
        assert "error" not in answer, answer["error"]
        found |= answer["loss"]
    assert found == pytest.approx(seen(1, ONE)["loss"], rel=BOUNDS["fp32"])
