"""Functions as jobs of a real Slurm of several machines."""

from __future__ import annotations

import os
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest

import worldsize as ws
from worldsize.errors import LaunchError
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.launch.functions.job import Job
    from worldsize.testing.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
LIMIT_S = 120


@pytest.fixture(autouse=True)
def _submitter(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process submits to that cluster, from a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])


def config(**settings: Any) -> ws.SlurmConfig:
    """Two nodes of two ranks, unless said otherwise."""
    return ws.SlurmConfig(**{"mode": "slurm", "num_of_node": 2, "tasks_per_node": 2, **settings})


def log(job: Job[Any]) -> str:
    """What a job printed, to be shown where a test fails."""
    return job.stdout()


@pytest.mark.parametrize(
    "launcher",
    ["worldsize", "torchrun", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("srun", "accelerate"))],
)
def test_the_exception_of_a_rank_of_another_node_is_raised_here(launcher: str) -> None:
    """Its own type, with rank, host, line and remote traceback, through every launcher (B094)."""

    @ws.job
    def fails() -> None:
        import time

        if os.environ["RANK"] == "3":
            raise KeyError("bad key x")
        time.sleep(600)

    job = fails[config(launcher=launcher)]()
    error = job.exception(LIMIT_S)
    assert isinstance(error, KeyError), (repr(error), log(job))
    (note,) = error.__notes__
    assert "On rank 3 of 4 on node2 (test_in_slurm.py:" in note
    assert 'raise KeyError("bad key x")' in note
    assert job.state.startswith("failed"), log(job)


@pytest.mark.parametrize("launcher", ["worldsize", "srun"])
def test_results_come_back_by_rank(launcher: str) -> None:
    """`result()` is rank 0's value, `results()` everybody's."""

    @ws.job
    def who(x: int) -> tuple[int, str, int]:
        import socket

        return int(os.environ["RANK"]), socket.gethostname(), x

    job = who[config(launcher=launcher)](5)
    assert job.result(LIMIT_S) == (0, "node1", 5), log(job)
    assert job.results() == [(0, "node1", 5), (1, "node1", 5), (2, "node2", 5), (3, "node2", 5)]


def test_a_job_spec_is_a_configuration(tmp_path: Path) -> None:
    """Its program is the function."""
    spec = JobSpec(program=("its.py",), nodes=2, env={"A": "b c"}, comment="mine")
    job = ws.job(lambda: (os.environ["RANK"], os.environ["A"]))[spec]()
    assert job.result(LIMIT_S) == ("0", "b c"), log(job)
    assert job.results()[1] == ("1", "b c")
    assert job.folder is not None
    assert job.folder.parent == tmp_path / "jobs"


def test_an_array_is_one_job_with_a_future_for_each_call() -> None:
    """Each member gets its own arguments; one that fails is the only one that does."""

    @ws.job
    def divide(a: int, b: int) -> float:
        return a / b

    jobs = divide[config(num_of_node=1, tasks_per_node=1)].map_array([1, 6, 8], [2, 0, 4])
    done, _ = wait(jobs, LIMIT_S)
    assert done == set(jobs)
    first = jobs[0].job_id.partition("_")[0]
    assert [job.job_id for job in jobs] == [f"{first}_0", f"{first}_1", f"{first}_2"]
    assert (jobs[0].result(), jobs[2].result()) == (0.5, 2.0)
    assert isinstance(jobs[1].exception(), ZeroDivisionError)


def test_dependencies_of_several_kinds_are_joined_as_slurm_wants_it() -> None:
    """Kinds with a comma, ids with a colon; a job that waits for a failure runs after it."""

    @ws.job
    def one(*, fail: bool = False) -> int:
        import time

        time.sleep(2 * fail)
        return 1 // (not fail)

    small = config(num_of_node=1, tasks_per_node=1)
    good, also, bad = one[small](), one[small](), one[small](fail=True)
    last = one[small].afterok(good, also)["afternotok":bad]()
    never = one[small][bad]()
    script = (last.folder / "script.sh").read_text() if last.folder else ""
    assert f"--dependency=afterok:{good.job_id}:{also.job_id},afternotok:{bad.job_id}" in script
    assert last.result(LIMIT_S) == 1
    with pytest.raises(LaunchError, match="cancelled"):
        never.result(LIMIT_S)
    with pytest.raises(LaunchError, match=r"afterok will never be: job .* failed"):
        one[small].afterok(bad)()


def test_a_job_that_died_without_a_word_is_told_in_slurms() -> None:
    """The state, the launcher's own line and the end of the log."""

    @ws.job
    def dies() -> None:
        os.write(1, b"the last words\n")
        os.kill(os.getpid(), 9)

    with pytest.raises(LaunchError, match=r"\(dies\), failed: exit code 137.* killed by SIGKILL") as caught:
        dies[config(num_of_node=1)]().result(LIMIT_S)
    assert "the last words" in "".join(caught.value.__notes__)


def test_a_cancelled_job_is_a_cancelled_future() -> None:
    """Slurm ends it, whoever waits is told."""

    @ws.job
    def sleeps() -> None:
        import time

        time.sleep(600)

    job = sleeps[config(num_of_node=1, tasks_per_node=1)]()
    end = time.monotonic() + LIMIT_S
    while not job.running():
        assert time.monotonic() < end, job
        time.sleep(0.1)
    assert job.cancel()
    assert job.cancelled()
    assert wait([job], 1).done == {job}


def test_a_job_that_another_cancelled_is_an_error(slurm: Cluster) -> None:
    """Not an answer that never comes."""

    @ws.job
    def sleeps() -> None:
        import time

        time.sleep(600)

    job = sleeps[config(num_of_node=1, tasks_per_node=1)]()
    slurm.run(["scancel", job.job_id])
    with pytest.raises(LaunchError, match="cancelled"):
        job.result(LIMIT_S)


def test_what_slurm_refuses_leaves_nothing(tmp_path: Path) -> None:
    """One line says why."""
    with pytest.raises(LaunchError, match="invalid partition"):
        ws.job(print)[config(partition="nowhere")]()
    assert list((tmp_path / "slurm").iterdir()) == []
