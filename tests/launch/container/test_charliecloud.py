"""A training in a container on two nodes of a real cluster, by Charliecloud."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import until
from tests.launch.container import image
from tests.launch.slurm.handing import Home
from worldsize.launch.yamlfile import load

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.container]

TRAINS = """
import json, os, shutil, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
share = torch.arange(32, dtype=torch.float64).reshape(8, 4).div(32)[dist.get_rank() :: dist.get_world_size()]
losses = []
for _ in range(5):
    loss = model(share).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    whole = loss.detach() / dist.get_world_size()
    dist.all_reduce(whole)
    losses.append(whole.item())
here = {"image": os.path.exists("/etc/image"), "slurm": shutil.which("scontrol"), "path": os.environ.get("PYTHONPATH")}
here |= {"job": os.environ["SLURM_JOB_ID"], "world": dist.get_world_size(), "losses": losses, "words": sys.argv[1:]}
with open(f"rank{dist.get_rank()}.json", "w") as file:
    json.dump(here, file)
del model  # before its group: see examples/function_jobs
dist.destroy_process_group()
"""
STOPS = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
open("up" + os.environ["RANK"], "w").close()
while not asked and not again: time.sleep(0.05)
if asked and os.environ["RANK"] == "0": open(os.environ["WORLDSIZE_EXIT_FILE"], "a").write("committed 3\\nstopped 3\\n")
print("saved" if asked else "went on", os.path.exists("/etc/image"), flush=True)
if asked: open("asked" + os.environ["RANK"], "w").close()
# As ranks that commit together: srun ends the others when one has left.
while asked and not all(os.path.exists(f"asked{rank}") for rank in range(4)): time.sleep(0.05)
sys.exit(75 if asked else 0)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file with a container."""
    place = image.make(tmp_path / "image")
    spec = {"image": str(place), "runtime": "charliecloud", "binds": image.binds(), "python": sys.executable}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"container": spec}), encoding="utf-8")
    assert load(path)
    return path


def test_two_nodes_train_in_a_container(slurm: Cluster, tmp_path: Path, job: Path) -> None:
    """One world over two nodes, each rank in the image, where there is no Slurm (B005); every argument as it was."""
    home, words = Home(slurm, tmp_path), ("a b", "$HOME", "it's")
    (tmp_path / "train.py").write_text(TRAINS, encoding="utf-8")
    home.completed(home.job("-c", job, "--nodes", "2", "--nproc-per-node", "2", "train.py", words=words))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert all(rank == ranks[0] for rank in ranks)
    assert (ranks[0]["image"], ranks[0]["slurm"], ranks[0]["world"], ranks[0]["path"]) == (True, None, 4, None)
    assert ranks[0]["words"] == list(words)
    assert ranks[0]["losses"] == sorted(ranks[0]["losses"], reverse=True)


@pytest.mark.parametrize("launcher", ["worldsize", "srun"])
def test_a_stop_goes_in_and_the_job_comes_back_outside(
    slurm: Cluster, tmp_path: Path, job: Path, launcher: str
) -> None:
    """The signal reaches every rank in the image; the queue is told by the batch script, which has scontrol (B040)."""
    home = Home(slurm, tmp_path)
    (tmp_path / "train.py").write_text(STOPS, encoding="utf-8")
    number = home.job("-c", job, "--nodes", "2", "--nproc-per-node", "2", "--launcher", launcher, "train.py")
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(4)), 60)
    assert slurm.run(["scancel", "--batch", "--signal=USR1", number]).code == 0
    log = home.completed(number)
    assert log.count("saved True") == 4
    assert log.count("went on True") == 4
