"""What `worldsize doctor` prints of the links between GPUs, beside a plain measurement of the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import environment

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = """
import os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
whole = torch.zeros(1 << 28, device="cuda")
for _ in range(5):
    dist.all_reduce(whole)
torch.cuda.synchronize()
began = time.perf_counter()
for _ in range(20):
    dist.all_reduce(whole)
torch.cuda.synchronize()
ranks = dist.get_world_size()
if dist.get_rank() == 0:
    print("bus", 2 * (ranks - 1) / ranks * (1 << 30) / ((time.perf_counter() - began) / 20), flush=True)
dist.destroy_process_group()
"""
LIMIT_S = 300


def printed(*words: str) -> str:
    """What a command of ours prints."""
    argv = [sys.executable, "-m", "worldsize", *words]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gpu(count=2)
def test_bus_bandwidth_is_that_of_a_plain_all_reduce(tmp_path: Path) -> None:
    """All-reduce of 1 GiB over all GPUs: within 10% of a loop around `dist.all_reduce`."""
    program = tmp_path / "plain.py"
    program.write_text(PLAIN, encoding="utf-8")
    plain = re.search(r"bus ([0-9.]+)", printed("run", "--nproc-per-node", "gpu", str(program)))
    findings = json.loads(printed("doctor", "--json"))["findings"]
    said = next(each["measured"] for each in findings if "all-gather" in each["measured"])
    found = re.search(r"all-reduce ([0-9.]+) GB/s", said)
    assert plain
    assert found
    assert float(found[1]) * 1e9 == pytest.approx(float(plain[1]), rel=0.1)
