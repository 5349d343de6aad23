"""A training as a job that is stopped, preempted, and loses a node, on a real Slurm: no step is lost that need not be."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.integration import slurmjob
from tests.integration.slurmjob import HERE, Job
from worldsize.runtime.hostlist import expand

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.waits]

PROGRAM = HERE / "survivor.py"


def start(slurm: Cluster, tmp_path: Path, *options: str, words: tuple[str, ...], ranks: int = 1) -> Job:
    """The training on two nodes of so many ranks."""
    nodes = ("--nodes", "2", "--nproc-per-node", str(ranks))
    return slurmjob.submit(slurm, tmp_path, PROGRAM, (*nodes, *options), words)


def nothing_lost(job: Job, steps: int, restarts: int) -> None:
    """It ended well after so many restarts; each sample was given once in each epoch; the curve is that of one rank."""
    assert job.ends() == "COMPLETED", job.log
    counts = slurmjob.repeated(job.ledger())
    assert sum(counts.values()) == steps * 16
    assert set(counts.values()) == {1}, job.log
    assert len(job.events("resume")) == restarts
    assert [row["step"] for row in job.events("stop")] == [row["step"] for row in job.events("resume")]
    slurmjob.same(job.losses(), slurmjob.alone(PROGRAM, str(steps), "never", "0", "0"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("limits", [1, pytest.param(3, marks=pytest.mark.matrix)])
def test_time_limits_lose_nothing(slurm: Cluster, tmp_path: Path, limits: int) -> None:
    """Each time the signal comes before the limit, the ranks agree, commit, and the job goes back into the queue."""
    # Slurm looks every half minute and sends it by so much too early: on a busy machine, too, a minute is left to work in.
    job = start(
        slurm,
        tmp_path,
        "--time",
        "2",
        "--signal-lead",
        "20",
        words=(str(200 * limits), "never", str(limits), "1.0"),
        ranks=2,
    )
    nothing_lost(job, 200 * limits, restarts=limits)


def test_preemption_with_a_warning_loses_nothing(slurm: Cluster, tmp_path: Path) -> None:
    """A job of a higher partition takes its nodes; it comes back when that is over."""
    job = start(slurm, tmp_path, "--partition", "spot", words=("60", "never", "1", "0.5"))
    job.steps_beyond(4)
    taker = slurm.run(
        ["sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "srun sleep 3"]
    )
    assert taker.code == 0, taker.err
    nothing_lost(job, 60, restarts=1)


def test_requeue_by_hand_loses_nothing(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all that runs: the ranks commit before SIGKILL follows."""
    job = start(slurm, tmp_path, words=("60", "never", "1", "0.5"))
    job.steps_beyond(4)
    assert slurm.run(["scontrol", "requeue", job.id]).code == 0
    nothing_lost(job, 60, restarts=1)


def test_a_dead_node_costs_at_most_what_was_not_committed(slurm: Cluster, tmp_path: Path) -> None:
    """A power cut: Slurm puts the job on other nodes, and it goes on from the newest commit."""
    job = start(slurm, tmp_path, words=("60", "5st", "1", "0.5"))
    job.steps_beyond(12)
    first = job.nodes
    slurm.kill("node2" if "2" in first else "node4")
    assert job.ends() == "COMPLETED", job.log
    (resumed,) = job.events("resume")
    made = max(row["step"] for row in job.ledger() if row["attempt"] == 0) + 1
    assert made - 5 <= resumed["step"] <= made
    slurmjob.same(job.losses(), slurmjob.alone(PROGRAM, "60", "5st", "0", "0"))


@pytest.mark.parametrize(
    "launcher", [pytest.param(each, marks=pytest.mark.matrix) for each in ("torchrun", "srun", "accelerate")]
)
def test_a_stop_reaches_the_ranks_through_every_launcher(slurm: Cluster, tmp_path: Path, launcher: str) -> None:
    """Those flatten exit codes, and some die of the signal; the record of rank 0 puts the job back into the queue."""
    job = start(slurm, tmp_path, "--launcher", launcher, words=("60", "never", "1", "0.5"), ranks=2)
    job.steps_beyond(4)
    assert slurm.run(["scancel", "--signal=USR1", "--batch", job.id]).code == 0
    nothing_lost(job, 60, restarts=1)


def test_where_no_job_may_be_requeued_another_follows(slurm: Cluster, tmp_path: Path) -> None:
    """It waits for this one's end and goes on in the same run folder; this one ends with 75, not with success."""
    job = start(slurm, tmp_path, "--no-requeue", words=("60", "never", "1", "0.5"))
    job.steps_beyond(4)
    assert slurm.run(["scancel", "--signal=USR1", "--batch", job.id]).code == 0
    assert job.ends() == "FAILED"
    assert job.log.count("ended with code 75") == 1
    follower = Job(slurm, (job.folder / f"next-{job.id}").read_text().strip(), job.folder, job.run)
    nothing_lost(follower, 60, restarts=1)


@pytest.mark.parametrize("requeue", ["--requeue", pytest.param("--no-requeue", marks=pytest.mark.matrix)])
def test_a_job_that_somebody_cancels_stays_ended(slurm: Cluster, tmp_path: Path, requeue: str) -> None:
    """The ranks save at SIGTERM; scancel is no request to come again."""
    job = start(slurm, tmp_path, requeue, words=("60", "never", "9", "0.5"))
    job.steps_beyond(4)
    assert slurm.run(["scancel", job.id]).code == 0
    assert job.ends() == "CANCELLED"
    assert "back into the queue\n" not in job.log
    assert not list(job.folder.glob("next-*"))


FAILS_ON_NODE2 = """
import os, sys, time, traceback
import worldsize as ws
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
if os.environ["RANK"] == "0":
    ws.committed("here", 1 if first else 2)
    print("on", os.environ["SLURM_JOB_NODELIST"], flush=True)
if first and os.environ["GROUP_RANK"] == "1":
    time.sleep(1)
    try:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    except RuntimeError:
        traceback.print_exc()
        time.sleep(2)  # srun drops what it has not passed on when it ends the step
        sys.exit(1)
time.sleep(5 if first else 0)
"""


@pytest.mark.parametrize("launcher", ["srun", "worldsize"])
def test_a_node_with_bad_hardware_is_left_out_of_the_next_attempt(
    slurm: Cluster, tmp_path: Path, launcher: str
) -> None:
    """The job goes back without it and without those that it never wanted: where a step was committed and a restart allowed."""
    (tmp_path / "fails.py").write_text(FAILS_ON_NODE2, encoding="utf-8")
    options = (
        "--nodes",
        "2",
        "--nproc-per-node",
        "1",
        "--launcher",
        launcher,
        "--max-restarts",
        "1",
        "--exclude",
        "node4",
    )
    job = slurmjob.submit(slurm, tmp_path, tmp_path / "fails.py", options, ())
    job.until(lambda: bool(job.nodes), "its start")
    bad = expand(job.nodes)[1]
    assert job.ends() == "COMPLETED", job.log
    assert "node failure, restart 1 of 1" in job.log
    (excluded,) = re.findall(r"ExcNodeList=(\S+)", slurm.run(["scontrol", "show", "job", job.id]).out)
    assert sorted(expand(excluded)) == sorted([bad, "node4"])
    assert bad not in expand(job.nodes)


MEMBER = """
import os, sys, time
import worldsize as ws
task, again = os.environ["SLURM_ARRAY_TASK_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
open(f"{sys.argv[1]}-{task}-{again}", "w").close()
end = time.monotonic() + (0 if again != "0" else float(sys.argv[2]))
while time.monotonic() < end and not ws.stop_requested():
    time.sleep(0.1)
if ws.stop_requested():
    ws.committed("here", 1)
    sys.exit(75)
"""


def test_of_an_array_only_the_preempted_member_comes_again(slurm: Cluster, tmp_path: Path) -> None:
    """Twenty members on four nodes; a job of a higher partition needs the place of one."""
    (tmp_path / "member.py").write_text(MEMBER, encoding="utf-8")
    options = ("--array", "0-19", "--partition", "spot", "--cpus-per-task", "1", "--mem", "100M")
    job = slurmjob.submit(slurm, tmp_path, tmp_path / "member.py", options, ("40",))
    job.until(lambda: len(list(tmp_path.glob("run-*-0"))) == 20, "twenty members")
    cpus = int(slurm.run(["sinfo", "-h", "-n", "node1", "-o", "%c"]).out.split()[0])
    used = len([1 for line in slurm.run(["squeue", "-h", "-t", "R", "-o", "%N"]).out.split() if line == "node1"])
    argv = [
        "sbatch",
        "-p",
        "high",
        "-w",
        "node1",
        f"--cpus-per-task={cpus - used + 1}",
        "--mem=1M",
        "-o",
        "/dev/null",
    ]
    taker = slurm.run([*argv, "--wrap", "sleep 4"])
    assert taker.code == 0, taker.err
    job.until(lambda: set(job.ask("%T").split()) == {"COMPLETED"}, "the end")
    again = sorted(tmp_path.glob("run-*-1"))
    assert len(again) == 1
    assert len(list(tmp_path.glob("run-*"))) == 21


def test_a_writer_that_was_cut_off_cannot_commit_when_the_link_returns(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm takes its node for dead and starts the job elsewhere; the old ranks go on, and their commits are refused."""
    job = slurmjob.submit(slurm, tmp_path, PROGRAM, (), ("120", "1st", "1", "0.5"))
    job.steps_beyond(3)
    node = job.nodes
    slurm.cut(node)
    assert slurm.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=cut"]).code == 0
    job.until(lambda: bool(job.events("resume")), "a second attempt")
    # It must not come back to the node where its own remains are still running: Slurm would hold it.
    assert slurm.run(["scontrol", "update", f"nodename={node}", "state=drain", "reason=cut"]).code == 0
    slurm.join(node)
    assert job.ends() == "COMPLETED", job.log
    assert "no longer owns" in job.log
    assert Counter(row["step"] for row in job.events("save")).most_common(1)[0][1] == 1
    slurmjob.same(job.losses(), slurmjob.alone(PROGRAM, "120", "1st", "0", "0"))
