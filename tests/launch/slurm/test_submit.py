"""From `worldsize submit` to the end of a job, on a real Slurm of several machines."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from worldsize.launch import shell

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

SAYS = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
with open(os.environ["SEEN"] + "/" + os.environ["RANK"], "w") as file:
    json.dump({"host": socket.gethostname(), "words": sys.argv[1:], **{name: os.environ[name] for name in names}}, file)
"""
STOPS_ONCE = """
import os, sys
first = not os.environ.get("SLURM_RESTART_COUNT", "0").strip("0")
if os.environ["RANK"] == "0":
    print("attempt", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
    if first:
        open(os.environ["WORLDSIZE_EXIT_FILE"], "a").write("stopped 3\\n")
sys.exit(75 if first else 0)
"""


def submit(slurm: Cluster | None, folder: Path, program: str, *words: str) -> shell.Done:
    """Call `worldsize submit` for a program in this folder, from an environment that a job around it has marked."""
    (folder / "train.py").write_text(program, encoding="utf-8")
    env = {"PATH": "/nowhere"} if slurm is None else {**slurm.env, "SLURM_NTASKS": "7"}
    argv = [sys.executable, "-m", "worldsize", "submit", "train.py", "--job-dir", str(folder / "job"), *words]
    return shell.call(argv, {**env, "HOME": str(folder)}, timeout=60, cwd=folder)


def submitted(
    slurm: Cluster, tmp_path: Path, program: str, *options: str, words: tuple[str, ...] = ()
) -> tuple[str, Path]:
    """Hand a program over by the command; its id and folder."""
    (tmp_path / "seen").mkdir()
    places = ("--chdir", str(tmp_path), "--env", f"SEEN={tmp_path / 'seen'}")
    done = submit(slurm, tmp_path, program, *places, *options, "--", *words)
    assert done.code == 0, done.err
    return done.out.strip(), tmp_path / "job"


def ended(slurm: Cluster, job: str) -> str:
    """Wait for the end of a job; its state."""

    def over() -> str:
        state = slurm.run(["squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T"]).out.strip()
        return state if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED") else ""

    end = time.monotonic() + 120
    while not (state := over()):
        assert time.monotonic() < end, slurm.run(["squeue", "--states=all"]).out
        time.sleep(0.3)
    return state


def seen(tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank wrote, by rank."""
    return [json.loads((tmp_path / "seen" / str(rank)).read_text()) for rank in range(4)]


@pytest.mark.parametrize("launcher", ["srun", "worldsize"])
def test_two_nodes_of_two_ranks_are_one_world(slurm: Cluster, tmp_path: Path, launcher: str) -> None:
    """Ranks, addresses and arguments are right on every node, whatever the submitter's own environment says."""
    words = ("a b", "$HOME", "--x=*")
    job, folder = submitted(
        slurm, tmp_path, SAYS, "--nodes", "2", "--nproc-per-node", "2", "--launcher", launcher, words=words
    )
    state = ended(slurm, job)
    assert state == "COMPLETED", (folder / f"slurm-{job}.out").read_text()
    ranks = seen(tmp_path)
    assert [(each["RANK"], each["LOCAL_RANK"], each["GROUP_RANK"]) for each in ranks] == [
        ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
    ]  # fmt: skip
    assert {each["WORLD_SIZE"] for each in ranks} == {"4"}
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks}) == 1
    assert len({each["host"] for each in ranks}) == 2
    assert all(each["words"] == list(words) for each in ranks)


def test_a_job_that_stopped_on_request_comes_back_under_its_id(slurm: Cluster, tmp_path: Path) -> None:
    """The record that rank 0 wrote puts it back; the log keeps both attempts."""
    job, folder = submitted(
        slurm, tmp_path, STOPS_ONCE, "--nodes", "2", "--launcher", "srun", "--nproc-per-node", "1"
    )
    state, log = ended(slurm, job), (folder / f"slurm-{job}.out").read_text()
    assert state == "COMPLETED", log
    assert log.index("attempt 0") < log.index("back into the queue") < log.index("attempt 1")


def test_nothing_is_left_of_a_job_that_slurm_refuses(slurm: Cluster, tmp_path: Path) -> None:
    """One line says why."""
    done = submit(slurm, tmp_path, "", "--partition", "nowhere")
    assert done.code == 2
    assert "invalid partition" in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "job").exists()


def test_a_preview_asks_no_slurm(tmp_path: Path) -> None:
    """It works where there is none."""
    done = submit(None, tmp_path, "", "--preview")
    assert done.code == 0
    assert done.out.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
