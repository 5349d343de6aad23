"""Where a GPU's time goes, told by events in its stream; and a profile of it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.conftest import ROOT, environment
from worldsize.runtime.clock import COMPUTE, DATA, OTHER, DeviceClock
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys, time, torch, worldsize as ws

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, number):
        time.sleep(0.0005)
        return torch.randn(512, generator=torch.Generator().manual_seed(number))

run = ws.Run(sys.argv[1], global_batch=64, micro_batch=32, duration="120st", profile="20:23", saving=ws.Saving(every=None))
model = run.model(lambda: torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]))
run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-4), model)
for step in run.steps(Slow()):
    for x in step.micro_batches:
        step.backward(model(x).square().mean(1))
    step.update()
"""


@pytest.mark.gpu(count=1)
def test_a_devices_phases_are_told_without_waiting_for_it() -> None:
    """The host runs ahead of work of some hundred milliseconds; what the device waits for is seen as what it is."""
    torch.randn(1, device="cuda").sum().item()
    clock, x = DeviceClock(), torch.randn(4096, 4096, device="cuda")
    (x @ x).sum().item()
    clock.start()
    began = time.perf_counter()
    clock.enter(COMPUTE)
    for _ in range(200):
        y = x @ x
    clock.enter(OTHER)
    clock.step()
    ahead = time.perf_counter() - began
    assert clock.read().steps == []
    y.sum().item()
    whole = time.perf_counter() - began
    time.sleep(0.05)
    clock.enter(DATA)
    time.sleep(0.2)
    clock.enter(OTHER)
    clock.step()
    torch.cuda.synchronize()
    spent = clock.read()
    assert len(spent.steps) == 2
    assert ahead < whole / 2
    assert spent.phases[COMPUTE] == pytest.approx(whole, rel=0.3)
    assert spent.phases[DATA] == pytest.approx(0.2, abs=0.05)


@pytest.mark.gpu(count=1)
def test_a_training_that_waits_for_data_says_so(tmp_path: Path) -> None:
    """Memory is the device's; the trace has its kernels."""
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "worldsize", "run", "--device", "cuda", "train.py", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "run" / "times.jsonl")
    phases = {name: sum(row["phases"][name][1] for row in rows) for name in rows[0]["phases"]}
    assert max(phases, key=lambda name: phases[name]) == "data"
    assert 1e6 < rows[-1]["memory"][1] <= rows[-1]["peak"][1]
    assert sum(row["steps"] for row in rows) == pytest.approx(120, abs=5)
    text = (tmp_path / "run" / "profiles" / "attempt-0" / "summary.txt").read_text(encoding="utf-8")
    assert "gemm" in text or "cutlass" in text or "Kernel" in text, text
    assert ROOT.is_dir()
