"""Which of several failures is the cause, and what is made of ends that no rank could tell."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from worldsize.errors import LaunchError
from worldsize.launch.functions import outcome, vault
from worldsize.launch.functions.here import Here, find
from worldsize.launch.functions.outcome import Outcome
from worldsize.launch.functions.watch import SlurmJob, Watcher
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.states import JobFacts, Listing, State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GONE = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234")


def rank(folder: Path, number: int, *, attempt: int = 0, restart: int = 0) -> Here:
    """One rank of two."""
    return Here(folder, "12", 0, attempt, restart, number, 2, f"node{number}")


def slurm_job(folder: Path, client: Client | None = None, job: str = "12") -> SlurmJob[Any]:
    """A job as the submitter has it."""
    folder.chmod(0o700)
    return SlurmJob(job, "main", folder, client or Client({}))


def ended(name: str, job: str = "12", restarts: int | None = 0) -> State:
    """What Slurm says at the end."""
    return State(job, name, "squeue", final=True, facts=JobFacts(job, int(job), state=name, restarts=restarts))


def over(job: SlurmJob[Any], state: State) -> SlurmJob[Any]:
    """Told twice, as a watcher does."""
    assert job.told(state) or job.told(state)
    return job


def test_the_earliest_failure_is_the_cause() -> None:
    """Whatever rank it was on; one that only says that a peer is gone never wins over it."""
    made = [Outcome(at, 3, "node1", when, raised="E") for at, when in enumerate((5.0, 4.0, 3.0))]
    found = outcome.root([made[0], made[1], replace(made[2], follows=True)])
    assert found == made[1]


def test_peers_that_lost_a_peer_are_told_by_their_words(tmp_path: Path) -> None:
    """Gloo's and NCCL's errors follow; a program's own connection is its own affair."""
    outcome.raised(rank(tmp_path, 0), GONE, by_name=False)
    outcome.raised(rank(tmp_path, 1), ConnectionRefusedError("Connection refused"), by_name=False)
    tmp_path.chmod(0o700)
    assert [each.follows for each in outcome.read(tmp_path, "12")] == [True, False]


def test_only_the_newest_attempt_counts(tmp_path: Path) -> None:
    """What failed before a restart that went well is history."""
    outcome.raised(rank(tmp_path, 0), KeyError("x"), by_name=False)
    outcome.returned(rank(tmp_path, 0, restart=1), 3, by_name=False)
    assert over(slurm_job(tmp_path), ended("COMPLETED")).result(0) == 3


@pytest.mark.parametrize("name", ["OUT_OF_MEMORY", "NODE_FAIL", "CANCELLED", "TIMEOUT"])
def test_an_end_from_outside_is_told_in_slurms_word(tmp_path: Path, name: str) -> None:
    """Also where a peer complains: that is a consequence, and told as one."""
    outcome.raised(rank(tmp_path, 0), GONE, by_name=False)
    words = {"OUT_OF_MEMORY": "out of memory", "NODE_FAIL": "failed node", "TIMEOUT": "time limit"}
    with pytest.raises(LaunchError, match=rf"job 12 \(main\), .*{words.get(name, 'cancelled')}") as caught:
        over(slurm_job(tmp_path), ended(name)).result(0)
    assert "As a consequence on rank 0 of 2 on node0" in "".join(caught.value.__notes__)


def test_a_launcher_that_fails_after_the_call_is_a_failure(tmp_path: Path) -> None:
    """A result is not believed before the job is over and well."""
    for number in (0, 1):
        outcome.returned(rank(tmp_path, number), 0, by_name=False)
    job = slurm_job(tmp_path)
    assert not job.told(State("12", "RUNNING", "squeue", final=False))
    with pytest.raises(LaunchError, match="failed"):
        over(job, ended("FAILED")).result(0)


def test_a_job_that_nobody_knows_any_more_is_what_its_ranks_left(tmp_path: Path) -> None:
    """Slurm forgets jobs; all ranks returned, so it went well."""
    for number in (0, 1):
        outcome.returned(rank(tmp_path, number), number, by_name=False)
    assert over(slurm_job(tmp_path), State("12", "UNKNOWN", "nobody", final=True)).results(0) == [0, 1]


def test_many_jobs_are_one_question(tmp_path: Path) -> None:
    """A watcher asks squeue for all of them at once; it stops where all are over."""
    questions: list[Sequence[str] | None] = []

    class Fake(Client):
        def listing(self, jobs: Sequence[str] | None = None, *, user: str | None = None) -> Listing:
            assert user is None
            questions.append(jobs)
            now = int(time.time())
            return Listing(tuple(JobFacts(job, int(job), state="CANCELLED", submit=now) for job in jobs or ()))

    client = Fake({})
    jobs = [slurm_job(tmp_path, client, str(number)) for number in range(1, 51)]
    watcher = Watcher(client)
    watcher.add(jobs)
    assert all(isinstance(job.exception(30), LaunchError) for job in jobs)
    assert len(questions) == 2
    assert [len(each or ()) for each in questions] == [50, 50]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_pickles_of_a_folder_that_others_can_write_are_not_loaded(tmp_path: Path, mode: int) -> None:
    """Neither of the folder itself nor of one below it."""
    vault.put(tmp_path / "a" / "b" / "call", b"x")
    tmp_path.chmod(0o700)
    assert vault.get(tmp_path, "a/b/call") == b"x"
    for folder in (tmp_path / "a", tmp_path):
        folder.chmod(mode)
        with pytest.raises(LaunchError, match=f"{folder} is not loaded: others can write it"):
            vault.get(tmp_path, "a/b/call")
        folder.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_pickles_of_another_user_are_not_loaded(tmp_path: Path) -> None:
    """Nor what a link leads to."""
    vault.put(tmp_path / "call", b"x")
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to("call")
    with pytest.raises(OSError, match="symbolic"):
        vault.get(tmp_path, "link")
    os.chown(tmp_path / "call", 65534, 65534)
    with pytest.raises(LaunchError, match="owner 65534"):
        vault.get(tmp_path, "call")


def test_a_job_inside_a_job_is_not_taken_for_it() -> None:
    """The mark counts in the job that it was made for only."""
    own = {"WORLDSIZE_CALL": "/jobs/a", "WORLDSIZE_EXIT_FILE": "/jobs/a/exit-12-0", "WORLDSIZE_JOB": "12"}
    assert find({**own, "RANK": "3", "WORLD_SIZE": "4"}) is not None
    assert find({**own, "WORLDSIZE_EXIT_FILE": "/jobs/b/exit-13-0"}) is None
