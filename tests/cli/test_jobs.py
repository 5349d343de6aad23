"""`worldsize logs, wait, cancel, requeue, restart, drill, status, why` about jobs of a real Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.launch.slurm.living import Desk
from worldsize.launch.slurm.tickets import recall, state_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

FAILS = "import os, sys\nprint('here')\nraise ValueError('bad key x')\n"


@pytest.fixture
def desk(slurm: Cluster, tmp_path: Path) -> Iterator[Desk]:
    """A user with an empty home, whose job does not come back afterwards."""
    (tmp_path / "home").mkdir()
    desk = Desk(slurm, tmp_path / "home")
    yield desk
    if desk.job:
        desk.ask("cancel", desk.job)


def test_a_job_that_is_told_to_stop_saves_and_stays_out(desk: Desk) -> None:
    """`cancel --stop`: everything is committed, and the batch script does not put it back; `restart` goes on from there."""
    job = desk.live()
    assert "told to stop" in desk.ask("cancel", "--stop", job).out
    waited = desk.ask("wait", job)
    assert (waited.code, waited.out) == (75, f"{job}: stopped\n")
    assert desk.state() != "PENDING"
    assert "back into the queue" not in desk.log
    (told,) = desk.said("why", job)
    assert (told["category"], told["do"]) == ("stopped", f"to go on: worldsize restart {job}")
    assert "committed up to step 3" in told["evidence"]
    again = desk.ask("restart", job).out.strip()
    desk.job = again
    desk.until(lambda: "resumes from step 3" in desk.log)
    former = recall(again, state_folder({"HOME": str(desk.home)}))
    assert former is not None
    assert (former.former, desk.said("status", job)[job][0]["next"]) == (job, again)
    assert f"job {again} has not ended" in desk.ask("restart", job).err


def test_cancel_says_what_it_ended(desk: Desk) -> None:
    """The state before, and it stays ended; a second time there is nothing to end."""
    job = desk.live()
    assert desk.ask("cancel", job).out.startswith(f"{job}: cancelled; it was running: on node")
    assert desk.ask("wait", "-q", job).code != 0
    assert (desk.folder / f"stay-{job}").exists()
    assert desk.said("why", job)[0]["category"] == "cancelled"
    assert desk.ask("cancel", job).out == f"{job}: has ended: cancelled\n"


@pytest.mark.parametrize(
    "words", [("cancel",), ("logs",), ("wait",), ("requeue",), ("restart",), ("drill",), ("why",)]
)
def test_a_job_that_nobody_knows(desk: Desk, words: tuple[str, ...]) -> None:
    """One line, code 2 (B034)."""
    done = desk.ask(*words, "999999")
    assert done.code == 2, done
    assert done.err.startswith("worldsize: there is no job 999999")
    assert len(done.err.splitlines()) == 1


def test_the_drill(desk: Desk) -> None:
    """Saved, back in the queue, running again, from the step that was saved."""
    job = desk.live()
    found = desk.said("drill", job)
    assert found["held"], found
    assert (found["step"], found["resumed"], found["again"]) == (3, 3, job)
    assert 0 < found["saved"] <= found["queued"] <= found["running"]


def test_the_drill_of_a_job_that_may_not_go_back(desk: Desk) -> None:
    """A job that follows is found and watched; from then on it is known by its own id too."""
    job = desk.live("--no-requeue")
    done = desk.ask("drill", job)
    assert done.code == 0, done.out
    again = recall(job, state_folder({"HOME": str(desk.home)}))
    assert again is not None
    (state,) = desk.said("status", job)[job]
    assert f"goes on as job {state['next']}" in done.out
    assert desk.said("status", state["next"])[state["next"]][0]["folder"] == str(desk.folder)


def test_the_drill_of_a_program_that_does_not_save(desk: Desk) -> None:
    """It ends, and the drill says that it had not saved."""
    desk.submit(program="import time\nprint('begins', flush=True)\ntime.sleep(600)\n")
    desk.until(lambda: "begins" in desk.log)
    done = desk.ask("drill", desk.job)
    assert done.code == 1
    assert "did not hold: it ended and had not saved" in done.out


def test_logs_follow_a_job_to_its_end(desk: Desk) -> None:
    """From before it runs, through a stop and another attempt, with the training's exit code."""
    job = desk.submit("--begin", "now+2")
    argv = [sys.executable, "-m", "worldsize", "logs", "-f", job]
    env = {**desk.cluster.env, "HOME": str(desk.home)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd="/"
    ) as follow:
        desk.until(lambda: "begins" in desk.log)
        desk.cluster.run(["scancel", "--signal=USR1", "--batch", job])
        desk.until(lambda: "resumes from step 3" in desk.log)
        desk.end(5)
        out, err = follow.communicate(timeout=90)
    assert follow.returncode == 5, err
    assert out == desk.log
    assert f"{job} is pending" in err
    assert f"{job} is failed: exit code 5" in err


def test_one_attempt_of_a_log(desk: Desk) -> None:
    """Only what that attempt printed."""
    job = desk.live()
    desk.ask("drill", job)
    assert "rank 0 begins" in desk.ask("logs", job, "--attempt", "0").out
    again = desk.ask("logs", job, "--attempt", "1").out
    assert again.startswith(f"worldsize: job {job}, attempt 1, on 1 nodes")
    assert "resumes from step 3" in again


def test_logs_of_ranks(desk: Desk) -> None:
    """Those that the supervisor keeps: one as it is, several with their rank before each line."""
    desk.end(0)
    job = desk.submit("--nodes", "2", "--nproc-per-node", "2", "--launcher", "worldsize")
    assert desk.ask("wait", job).code == 0, desk.log
    assert desk.ask("logs", job, "--rank", "3").out == "rank 3 begins\n"
    two = desk.ask("logs", job, "--rank", "1", "--rank", "2").out
    assert two == "[rank 1] rank 1 begins\n[rank 2] rank 2 begins\n"
    assert len(desk.ask("logs", job, "--rank", "all").out.splitlines()) == 4


def test_members_of_an_array(desk: Desk) -> None:
    """Logs are merged with the member before each line; a requeue wants one member, and takes that alone (B039)."""
    job = desk.submit("--array", "0-2")
    log = desk.folder / f"slurm-{job}_2.out"
    desk.until(lambda: log.exists() and "begins" in log.read_text())
    refused = desk.ask("requeue", job)
    assert (refused.code, f"{job} is an array of 3 jobs" in refused.err) == (2, True)
    done = desk.ask("requeue", f"{job}_1")
    assert (done.code, done.out) == (0, f"{job}_1: back in the queue\n"), done.err
    desk.until(lambda: "attempt 1" in (desk.folder / f"slurm-{job}_1.out").read_text())
    restarts = desk.cluster.run(["squeue", "-h", "-j", job, "--array", "-S", "i", "--Format=RestartCnt"]).out.split()
    assert sorted(restarts) == ["0", "0", "1"]
    lines = desk.ask("logs", job).out.splitlines()
    assert f"[{job}_2] rank 0 begins" in lines
    assert desk.ask("logs", f"{job}_2").out == log.read_text()
    assert desk.ask("cancel", job).out.count("cancelled") == 3


def test_a_completed_job_is_not_requeued(desk: Desk) -> None:
    """Slurm would run it again."""
    desk.end(0)
    job = desk.submit()
    assert desk.ask("wait", job, "-q").code == 0
    done = desk.ask("requeue", job)
    assert done.code == 2
    assert "has completed: Slurm would start it again" in done.err


def test_why_a_training_failed(desk: Desk) -> None:
    """Its exception and line, from the job's own record, once; and where the traceback is (B094)."""
    job = desk.submit(program=FAILS)
    assert desk.ask("wait", job, "-q").code == 1
    (told,) = desk.said("why", job)
    assert told["category"] == "user error"
    assert told["do"] == f"mend the program; its traceback: worldsize logs {job}"
    assert sum("ValueError: bad key x" in line for line in told["evidence"]) == 1, told
    assert any("train.py:3" in line for line in told["evidence"])


def forgotten(desk: Desk, job: str) -> str:
    """What `status` says where squeue has forgotten the job."""
    squeue = desk.home / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    squeue.chmod(0o755)
    env = {**desk.cluster.env, "HOME": str(desk.home), "PATH": f"{desk.home}:/usr/bin:/bin"}
    argv = [sys.executable, "-m", "worldsize", "status", job]
    return subprocess.run(argv, capture_output=True, text=True, env=env, check=True).stdout


def test_the_end_of_a_job_that_slurm_has_forgotten(desk: Desk) -> None:
    """Its own record says it, and that accounting is absent is said too (B034)."""
    desk.end(3)
    job = desk.submit()
    assert desk.ask("wait", job, "-q").code == 3
    told = forgotten(desk, job)
    assert told.startswith(f"{job}: failed: says the job's own record")
    assert "accounting is disabled" in told


@pytest.mark.slurm(accounting=True)
def test_accounting_tells_the_end_of_a_job_that_squeue_has_forgotten(
    slurm_accounted: Cluster, tmp_path: Path
) -> None:
    """It is asked second (B034)."""
    desk = Desk(slurm_accounted, tmp_path)
    desk.end(3)
    job = desk.submit()
    assert desk.ask("wait", job, "-q").code == 3
    end = time.monotonic() + 30
    while "says the job's own record" in (told := forgotten(desk, job)) and time.monotonic() < end:
        time.sleep(0.5)  # accounting is late by a second or two
    assert told.startswith(f"{job}: failed: exit code 3")


def test_logs_of_a_job_that_is_not_ours(desk: Desk) -> None:
    """Slurm says where its output is; its parts are known from its log alone."""
    log = desk.home / "other.out"
    script = "python3 -c 'raise ValueError(1)'"
    job = desk.cluster.run(["sbatch", "--parsable", f"--output={log}", f"--wrap=echo hello; {script}"]).out.strip()
    assert desk.ask("wait", job, "-q").code == 1
    assert desk.ask("logs", job).out == log.read_text()
    (told,) = desk.said("why", job)
    assert "its log: ValueError: 1" in " ".join(told["evidence"])
    assert "worldsize submit" in desk.ask("restart", job).err


def test_waiting_ends_and_the_job_goes_on(desk: Desk) -> None:
    """When the time is over, or at Ctrl-C."""
    job = desk.live()
    assert desk.ask("wait", job, "--timeout", "1s").code == 124
    argv = [sys.executable, "-m", "worldsize", "wait", job]
    env = {**desk.cluster.env, "HOME": str(desk.home)}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env) as wait:
        assert wait.stderr is not None
        assert "running" in wait.stderr.readline()
        wait.send_signal(signal.SIGINT)
        assert "the jobs go on" in wait.stderr.read()
    assert wait.returncode == 130
    assert desk.state() == "RUNNING"
