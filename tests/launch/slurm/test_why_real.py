"""`worldsize why` on a real cluster: jobs that wait for each of the usual reasons. Category, evidence, what to do."""

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

_LONG = "60:00"


class Queue:
    """Jobs of plain Slurm on this cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def put(self, *options: str, script: str = "sleep 600") -> str:
        """A new job; its id."""
        asked = ["sbatch", "--parsable", "--output=/dev/null", f"--time={_LONG}", *options, f"--wrap={script}"]
        done = self._cluster.run(asked)
        assert done.code == 0, done.err
        return done.out.strip()

    def fill(self) -> str:
        """A job that has every node."""
        job = self.put("--nodes=4", "--exclusive", "--job-name=big")
        self.until(job, "RUNNING")
        return job

    def until(self, job: str, *facts: str) -> None:
        """Wait for a state, or a reason."""
        end, asked = time.monotonic() + 60, ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T %r"]
        while not any(fact in (now := self._cluster.run(asked).out) for fact in facts):
            assert time.monotonic() < end, now
            time.sleep(0.2)

    def why(self, job: str, *reasons: str) -> dict[str, Any]:
        """What we say, once Slurm gives one of these reasons."""
        self.until(job, *reasons)
        env = {**self._cluster.env, "HOME": str(self._folder)}
        done = shell.call([sys.executable, "-m", "worldsize", "why", job, "--json"], env, timeout=60)
        assert done.code == 0, done.err
        (told,) = json.loads(done.out)
        assert isinstance(told, dict)
        return told


@pytest.fixture
def queue(slurm: Cluster, tmp_path: Path) -> Queue:
    """An empty one."""
    return Queue(slurm, tmp_path)


def test_resources(queue: Queue) -> None:
    """What it needs and how many nodes have that free; who holds them, and until when."""
    big = queue.fill()
    told = queue.why(queue.put("--nodes=2"), "Resources")
    assert told["category"] == "resources"
    assert told["evidence"][0].startswith("needs 2 nodes with 1 CPUs")
    assert told["evidence"][0].endswith("0 of 4 have that free")
    assert any(line.startswith(f"{big} (big, ") and " holds node[1-4] until " in line for line in told["evidence"])


def test_priority(queue: Queue) -> None:
    """The job before it, and what that waits for."""
    queue.fill()
    first = queue.put("--nodes=4", "--job-name=first")
    queue.until(first, "Resources")
    told = queue.why(queue.put("--nodes=4", "--time=2:00:00"), "Priority")
    assert told["category"] == "priority"
    assert told["evidence"][0] == "1 jobs wait before it in main"
    assert told["evidence"][1].startswith(f"{first} (first, ")
    assert "shorter --time" in told["do"]


def test_dependency(queue: Queue) -> None:
    """The job it waits for, and what that does."""
    other = queue.put()
    queue.until(other, "RUNNING")
    told = queue.why(queue.put(f"--dependency=afterok:{other}"), "Dependency")
    assert told["category"] == "dependency"
    assert told["evidence"] == [f"afterok:{other} is unfulfilled, now running"]


def test_a_dependency_that_will_never_be_met(queue: Queue) -> None:
    """It would wait for ever: cancel it."""
    other = queue.put(script="exit 3")
    queue.until(other, "FAILED")
    job = queue.put(f"--dependency=afterok:{other}")
    told = queue.why(job, "DependencyNeverSatisfied")
    assert told["category"] == "dependency that will never be met"
    assert told["do"].startswith(f"cancel it: scancel {job}")


def test_a_time_limit_over_the_partitions(queue: Queue) -> None:
    """Both limits, the command that mends it, and where it would fit."""
    job = queue.put("--partition=short")
    told = queue.why(job, "PartitionTimeLimit")
    assert told["category"] == "time limit of the partition"
    assert told["evidence"] == ["asks for 01:00:00", "short allows 00:01:00"]
    assert told["do"].startswith(
        f"scontrol update jobid={job} timelimit=00:01:00, or use a partition that allows it: main"
    )


def test_a_node_that_is_down(queue: Queue, slurm: Cluster) -> None:
    """Its name and reason, the administrator's command, and that another node would do."""
    slurm.kill("node3")
    slurm.run(["scontrol", "update", "nodename=node3", "state=down", "reason=broken fan"])
    told = queue.why(queue.put("--nodelist=node3"), "ReqNodeNotAvail", "NodeDown", "DOWN")
    assert told["category"] == "a node that is not available"
    assert told["evidence"][0].startswith('node3 is down: "broken fan"')
    assert "scontrol update nodename=node3 state=resume" in told["do"]
    assert told["do"].endswith("do not ask for node3")


def test_held_by_its_owner(queue: Queue) -> None:
    """The command that releases it."""
    job = queue.put("--hold")
    told = queue.why(job, "JobHeld")
    assert told["category"].startswith("held by")
    assert told["do"].endswith(f"scontrol release {job}")


def test_too_many_nodes(queue: Queue) -> None:
    """What the partition has."""
    told = queue.why(queue.put("--nodes=9"), "PartitionNodeLimit", "Resources")
    assert told["category"] == "node limit of the partition"
    assert told["evidence"] == ["asks for 9 nodes", "main has 4 nodes and allows 4 a job"]


def test_a_begin_time(queue: Queue) -> None:
    """When, and how it starts earlier."""
    job = queue.put("--begin=now+3600")
    told = queue.why(job, "BeginTime")
    assert told["category"] == "begin time"
    assert told["do"] == f"to start earlier: scontrol update jobid={job} starttime=now"


def test_the_limit_of_an_array(queue: Queue) -> None:
    """The members that run, and how more would."""
    array = queue.put("--array=0-2%1")
    queue.until(f"{array}_0", "RUNNING")
    told = queue.why(f"{array}_2", "JobArrayTaskLimit")
    assert told["evidence"] == [f"1 members run: {array}_0"]


def test_a_job_that_runs(queue: Queue) -> None:
    """Nothing is said that is not known: no category, no evidence."""
    job = queue.put()
    told = queue.why(job, "RUNNING")
    assert (told["states"], told["category"], told["evidence"], told["do"]) == (["RUNNING"], None, [], None)
