"""A real program, planned; and beside it what the same program really holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldsize.tools.plan import judge
from worldsize.tools.plan.asking import Program, answers
from worldsize.tools.trial import Layout

PROGRAM = """
import sys, torch
import worldsize as ws
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

run = ws.Run(sys.argv[1], global_batch=32, micro_batch=4, duration="4st", data=TensorDataset(torch.randn(64, 64)))
model = run.model(Net)
run.optimizer(lambda m: torch.optim.Adam(m.parameters()), model)
for step in run.steps():
    for (x,) in step.micro_batches:
        losses = (model(x) - x).square().mean(1)
        if losses.sum().item() != losses.sum().item():
            raise ValueError
        step.backward(losses)
    step.update()
"""
NUMBERS = 3 * (64 * 64 + 64)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that reads a value in each micro-batch."""
    path = tmp_path_factory.mktemp("plan") / "train.py"
    path.write_text(PROGRAM)
    return path


def asked(script: Path, *names: str) -> list[dict[str, Any]]:
    """What is answered for layouts of one rank to ask each."""
    layouts = [Layout.parse(name) for name in names]
    questions = [each for layout in layouts for each in judge.questions(layout, min(8, layout.ranks))]
    return answers(Program(str(script), (str(script.parent / "run"),)), questions)


@pytest.mark.timeout(300)
def test_state_is_counted_as_each_layout_holds_it(script: Path) -> None:
    """Whole under ddp, a fourth under fsdp, without a run folder; too many ranks are refused as a real start refuses them."""
    ddp, fsdp, many = asked(script, "ddp:4", "fsdp:4", "fsdp:64")
    for found, share in ((ddp, 1), (fsdp, 4)):
        assert found["parts"]["parameters"] == pytest.approx(4 * NUMBERS / share, abs=6 * 512)
        assert found["parts"]["optimizer"] >= 8 * NUMBERS / share
        assert found["whole"]["trained"] == NUMBERS
    assert fsdp["peak"] < ddp["peak"]
    assert (ddp["batch"]["most"], ddp["batch"]["micro_batches"]) == (2, 8)
    assert ddp["traffic"]["within"]["1"] / 2 == pytest.approx(2 * 4 * NUMBERS * 3 / 4, rel=0.01)
    assert "more ranks than micro-batches" in many["error"]
    assert not (script.parent / "run").exists()


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_what_is_planned_is_what_real_ranks_hold() -> None:
    """Every layout's peak within a hundredth of what is counted in real runs on gloo."""
    root = Path(__file__).parents[3]
    out = root / "plan-errors.json"
    try:
        command = [sys.executable, "benchmarks/plan.py", "--size", "tiny", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr
        errors = {row["layout"]: row["error"] for row in json.loads(out.read_text())}
    finally:
        out.unlink(missing_ok=True)
    assert {layout: error for layout, error in errors.items() if abs(error) > 0.01} == {}


@pytest.mark.matrix
def test_a_program_that_ends_by_itself_says_why(tmp_path: Path) -> None:
    """As commands do with an error; or without a word."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import os\nfrom worldsize.errors import ConfigError\nfrom worldsize.runtime import failure\n"
        "if os.environ['WORLD_SIZE'] == '2':\n    failure.end(ConfigError('that does not go', do='else'))\nos._exit(3)\n"
    )
    said, silent = asked(script, "ddp:2", "ddp:4")
    assert said["error"] == "that does not go. Do: else."
    assert silent["error"] == "the program ended by itself, with code 3"
