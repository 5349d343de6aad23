"""What happens to the processes of a training on GPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import PROGRAM, command, environment

if TYPE_CHECKING:
    from collections.abc import Mapping

TWO = pytest.mark.gpu(count=2)
START_S, END_S = 120, 10


def wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    """What is in the file, once it is there and not empty."""
    until = time.monotonic() + START_S
    while not (path.exists() and path.read_text(encoding="utf-8")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


@TWO
def test_a_killed_rank_ends_the_job_with_its_name(tmp_path: Path) -> None:
    """A rank that SIGKILL ends takes the whole job with it within 10 seconds, and the last line names it."""
    process = subprocess.Popen(
        command(2, tmp_path, "ddp-forever"),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        pids = [int(wait_for(tmp_path / f"pid-{rank}", process)) for rank in (0, 1)]
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        _, told = process.communicate(timeout=START_S)
    finally:
        process.kill()
    assert time.monotonic() - killed < END_S, told
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2" in told
    assert "SIGKILL" in told
    assert not Path(f"/proc/{pids[0]}").exists()


WHERE = """
import sys, torch, worldsize
from worldsize.runtime.session import session
here = session()
rank = torch.full((), float(here.world.rank), device=here.device)
torch.distributed.all_reduce(rank)
print(here.device, torch.cuda.device_count(), torch.cuda.get_device_properties(here.device).uuid, float(rank))
"""


def mpi_rank(rank: int, visible: str, port: int) -> Mapping[str, str]:
    """The environment of one of two ranks that Open MPI started, each with a list of devices of its own."""
    words = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in words.items()} | {
        "CUDA_VISIBLE_DEVICES": visible,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@TWO
def test_each_rank_may_see_one_device_of_its_own() -> None:
    """B015: two ranks that each see one GPU, as `--gpus-per-task=1` gives it, use device 0, and two physical devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WHERE], env=environment(**mpi_rank(rank, str(rank), port)), stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    answers = [process.communicate(timeout=START_S)[0].split() for process in ranks]
    assert [(device, count, total) for device, count, _, total in answers] == [("cuda:0", "1", "1.0")] * 2
    assert len({uuid for _, _, uuid, _ in answers}) == 2


@TWO
def test_more_ranks_than_devices_are_refused() -> None:
    """Three ranks on a machine where two devices are visible: refused with both numbers before any trains."""
    done = subprocess.run(
        command(3, PROGRAM.parent, "ddp-fp32"), env=environment(CUDA_VISIBLE_DEVICES="0,1"), capture_output=True, text=True,
        timeout=START_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "3" in done.stderr
    assert "2" in done.stderr
    assert "device" in done.stderr.lower()
