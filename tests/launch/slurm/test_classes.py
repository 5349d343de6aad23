"""How a job ended, and whether it is worth another try."""

from __future__ import annotations

import pytest

from tests.launch.slurm import lines
from worldsize.launch.endings import Ending
from worldsize.launch.slurm.classes import classify
from worldsize.launch.slurm.states import ExitRecord, JobFacts, State

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n'


def ended(name: str, code: int | None = None, signal: int = 0) -> State:
    """A job that squeue lists as over."""
    return State("7", name, "squeue", final=True, facts=JobFacts("7", 7, state=name, exit_code=code, signal=signal))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (ended("COMPLETED", 0), Ending.COMPLETED),
        (ended("FAILED", 3), Ending.USER_ERROR),
        (ended("FAILED", 75), Ending.STOPPED),
        (ended("FAILED", 0, 9), Ending.UNKNOWN),
        (ended("FAILED", 137), Ending.UNKNOWN),
        (ended("TIMEOUT", 0, 15), Ending.TIME_LIMIT),
        (ended("DEADLINE"), Ending.TIME_LIMIT),
        (ended("PREEMPTED"), Ending.PREEMPTED),
        (ended("NODE_FAIL"), Ending.NODE_FAILURE),
        (ended("BOOT_FAIL"), Ending.NODE_FAILURE),
        (ended("OUT_OF_MEMORY", 0, 125), Ending.HOST_MEMORY),
        (ended("CANCELLED", 0, 15), Ending.CANCELLED),
        (ended("RUNNING"), Ending.UNKNOWN),
        (ended("UNKNOWN"), Ending.UNKNOWN),
    ],
)
def test_by_state(state: State, expected: Ending) -> None:
    """Slurm's state is enough where it is clear."""
    assert classify(state) is expected


@pytest.mark.parametrize(
    ("state", "record", "expected"),
    [
        (ended("FAILED", 1), ExitRecord(75), Ending.STOPPED),
        (ended("COMPLETED", 0), ExitRecord(75), Ending.STOPPED),
        (ended("COMPLETED", 0), ExitRecord(1), Ending.USER_ERROR),
        (ended("FAILED", 1), ExitRecord(0), Ending.COMPLETED),
        (ended("TIMEOUT"), ExitRecord(75), Ending.TIME_LIMIT),
        (ended("PREEMPTED"), ExitRecord(75), Ending.PREEMPTED),
        (ended("CANCELLED"), ExitRecord(75), Ending.CANCELLED),
        (ended("FAILED", 1), ExitRecord(1, line="OutOfMemoryError: CUDA out of memory"), Ending.GPU_MEMORY),
        (ended("FAILED", 1), ExitRecord(1, line="exit code 1", ending=Ending.NODE_FAILURE), Ending.NODE_FAILURE),
        (ended("FAILED", 3), ExitRecord(step=40), Ending.USER_ERROR),
        (ended("NODE_FAIL"), ExitRecord(step=40), Ending.NODE_FAILURE),
        (ended("COMPLETED", 0), ExitRecord(step=40), Ending.COMPLETED),
    ],
)
def test_the_record_decides(state: State, record: ExitRecord, expected: Ending) -> None:
    """Launchers flatten exit codes; the training's own record does not."""
    assert classify(state, record) is expected


def test_a_record_of_another_attempt_decides_nothing() -> None:
    """It spoke of what came before."""
    state = State(
        "7", "FAILED", "squeue", final=True, facts=JobFacts("7", 7, state="FAILED", exit_code=1, restarts=1)
    )
    assert classify(state, ExitRecord(75, restarts=0)) is Ending.USER_ERROR


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (f"{TRACE}ValueError: bad key x\n", Ending.USER_ERROR),
        (f"{TRACE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", Ending.GPU_MEMORY),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.\n", Ending.HOST_MEMORY),
        ("worldsize: node1 did not say within 60 s where it listens.\n", Ending.RENDEZVOUS),
        (f"{TRACE}torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n", Ending.RENDEZVOUS),
        (f"{TRACE}torch.distributed.DistStoreError: Timed out waiting for clients.\n", Ending.RENDEZVOUS),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n", Ending.HANG),
        (f"{TRACE}RuntimeError: [gloo] Timed out waiting 1800000ms for recv operation to complete\n", Ending.HANG),
        (f"{TRACE}ValueError: x\n{TRACE}RuntimeError: Connection closed by peer\nWatchdog caught\n", Ending.USER_ERROR),
        ("CUDA error: uncorrectable ECC error encountered\n", Ending.NODE_FAILURE),
    ],
)  # fmt: skip
def test_by_the_log(tail: str, expected: Ending) -> None:
    """A failed job's class is in what it printed last."""
    assert classify(ended("FAILED", 1), tail=tail) is expected


def test_a_preempted_job_may_be_called_cancelled() -> None:
    """Where preemption cancels, the log says that it was one."""
    tail = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-28T05:05:17 DUE TO PREEMPTION ***\n"
    assert classify(ended("CANCELLED"), tail=tail) is Ending.PREEMPTED


@pytest.mark.parametrize("ending", [Ending.USER_ERROR, Ending.CANCELLED, Ending.COMPLETED, Ending.GPU_MEMORY])
def test_never_tried_again(ending: Ending) -> None:
    """It would end the same, or nobody wants it."""
    assert not ending.retry


@pytest.mark.parametrize(
    ("job", "expected"),
    [("18", Ending.USER_ERROR), ("22", Ending.STOPPED),
     ("23", Ending.COMPLETED), ("24", Ending.TIME_LIMIT), ("28", Ending.CANCELLED)],
)  # fmt: skip
def test_of_a_real_cluster(job: str, expected: Ending) -> None:
    """What sacct kept of jobs that ended in each way."""
    facts = next(facts for facts in lines.accounting() if facts.job == job)
    assert classify(State(job, facts.state, "sacct", final=True, facts=facts)) is expected
