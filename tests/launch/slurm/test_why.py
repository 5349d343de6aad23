"""Why jobs of a real cluster waited, and why jobs ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launch.slurm import lines
from worldsize.launch.endings import Ending
from worldsize.launch.slurm.classes import classify
from worldsize.launch.slurm.nodes import when
from worldsize.launch.slurm.states import ExitRecord, JobFacts, State
from worldsize.launch.slurm.why import Around, Why, why_ended, why_waiting


def waits(job: str, **changed: str) -> Why:
    """Why a recorded job waits."""
    why = why_waiting(replace(lines.queue()[job], **changed), lines.around())  # type: ignore[arg-type]
    assert why is not None
    return why


def test_the_time_limit_of_the_partition() -> None:
    """What was asked, what is allowed, the command that mends it, and where it would fit."""
    assert waits("5") == Why(
        "time limit of the partition",
        ("asks for 01:40:00", "short allows 00:10:00"),
        "scontrol update jobid=5 timelimit=00:10:00, or use a partition that allows it: main, high",
    )


def test_the_node_limit_of_the_partition() -> None:
    """The job's nodes and the partition's."""
    assert waits("6").evidence == ("asks for 2 nodes", "short has 2 nodes and allows 1 a job")


def test_a_drained_node() -> None:
    """Its name, the reason, since when, and the administrator's command."""
    why = waits("33")
    assert why.evidence == (f'node2 is drained: "disk is full | ask ops", by ana, since {when(1795842167)}',)
    assert "scontrol update nodename=node2 state=resume" in (why.do or "")


def test_a_dependency_that_cannot_be_met() -> None:
    """The job it waits for, how that ended, and that it must be cancelled."""
    assert waits("29") == Why(
        "dependency that will never be met",
        ("afterok:28 is failed",),
        "cancel it: scancel 29; then submit it again",
    )


def test_a_dependency() -> None:
    """The job it waits for and what that does now."""
    why = waits("29", reason="Dependency", dependency="afterok:13(unfulfilled),afterany:99(unfulfilled)")
    assert why.evidence == ("afterok:13 is unfulfilled, now running", "afterany:99 is unfulfilled")


def test_held_by_its_owner() -> None:
    """The owner releases it."""
    assert waits("34", reason="JobHeldUser").do == "scontrol release 34"


def test_held_by_an_administrator() -> None:
    """An administrator releases it."""
    assert waits("34").do == "ask an administrator to run: scontrol release 34"


def test_a_limit_of_the_qos() -> None:
    """The limit's name, and the jobs that fill it."""
    assert waits("14").evidence == ("QOS small: QOSMaxJobsPerUserLimit", "1 jobs of ana run under it: 13")


def test_a_limit_of_the_account() -> None:
    """The association is named."""
    why = waits("14", reason="AssocGrpCpuLimit", account="lab")
    assert (why.category, why.do) == ("a limit of the account", "see the limits with: sacctmgr show assoc lab")


def test_the_limit_of_an_array() -> None:
    """The members that run."""
    assert waits("12_3").evidence == ("2 members run: 12_0, 12_1",)


def test_resources() -> None:
    """How many nodes fit, which are out, and who holds the others."""
    why = waits("25", reason="Resources", asked_nodes="")
    assert why.evidence[0] == "needs 1 nodes with 8 CPUs, 4000 MiB each; 0 of 4 have that free"
    assert why.evidence[1] == "1 of them are out: node2"
    assert f"32 (onmaint, ana) holds node4 until {when(1795844121)}" in why.evidence


def test_resources_that_no_node_has() -> None:
    """It is said that the job cannot start as it is."""
    why = waits("25", reason="Resources", asked_nodes="", tres="cpu=64,mem=1G,node=1")
    assert "only 0 of them are large enough at all" in why.evidence
    assert why.do == "ask for less a node, or for fewer nodes: it cannot start as it is"


def test_priority() -> None:
    """The jobs before it that could start; those that are held or limited do not count."""
    job = JobFacts("7", 7, state="PENDING", reason="Priority", partition="main", priority=5, limit=60)
    first = replace(job, job="8", number=8, name="big", user="ben", priority=9, reason="Resources", nodes=3)
    held = replace(first, job="9", number=9, reason="JobHeldUser")
    why = why_waiting(job, Around(jobs=[job, first, held, replace(first, number=10, partition="high")]))
    assert why == Why(
        "priority", ("1 jobs wait before it in main", "8 (big, ben): 3 nodes, waiting for resources"), None
    )


def test_the_begin_time_of_a_requeued_job() -> None:
    """Slurm waits by itself: nothing is to be done."""
    why = why_waiting(JobFacts("7", 7, state="PENDING", reason="BeginTime", start=1795842167, restarts=1), Around())
    assert why is not None
    assert (why.evidence[0], why.do) == (f"begins at {when(1795842167)} at the earliest", None)


def test_licences() -> None:
    """Who holds them."""
    other = JobFacts("8", 8, "sim", "ben", "RUNNING", licenses="matlab:2")
    job = JobFacts("7", 7, state="PENDING", reason="Licenses", licenses="matlab:1")
    why = why_waiting(job, Around(jobs=[other]))
    assert why is not None
    assert why.evidence == ("asks for matlab:1", "8 (ben) holds matlab:2")


@pytest.mark.parametrize(
    "reason",
    [
        "Resources", "Priority", "Dependency", "DependencyNeverSatisfied", "PartitionTimeLimit", "PartitionNodeLimit",
        "PartitionDown", "ReqNodeNotAvail", "JobHeldUser", "JobHeldAdmin", "AssocGrpNodeLimit", "QOSGrpGRES", "BeginTime",
        "Reservation", "InvalidAccount", "InvalidQOS", "Licenses", "BadConstraints", "JobArrayTaskLimit", "SomethingNew",
    ],
)  # fmt: skip
def test_nothing_known_is_no_error(reason: str) -> None:
    """With nothing but the reason there is an answer, and no invented evidence."""
    why = why_waiting(JobFacts("7", 7, state="PENDING", reason=reason), Around())
    assert why is not None
    assert all(
        line.startswith(("Slurm's reason", "asks for", "the account", "QOS", "account")) for line in why.evidence
    )


def test_every_recorded_job_has_an_answer() -> None:
    """Each waiting job of the cluster gets evidence."""
    waiting = [job for job, facts in lines.queue().items() if facts.state == "PENDING"]
    assert [job for job in waiting if not waits(job).evidence] == []


def test_a_running_job_waits_for_nothing() -> None:
    """No answer."""
    assert why_waiting(lines.queue()["13"], lines.around()) is None


@pytest.mark.parametrize(
    ("name", "category", "said"),
    [
        ("limit", "time limit", "its limit was 00:01:00"),
        ("user-error", "user error", "exit code 3"),
        ("cancelled", "cancelled", "Slurm's state: CANCELLED"),
        ("stopped", "stopped", "exit code 75"),
    ],
)
def test_why_jobs_ended(name: str, category: str, said: str) -> None:
    """The class, and what Slurm says."""
    facts = lines.over()[name]
    state = State(facts.job, facts.state, "squeue", final=True, facts=facts)
    why = why_ended(state, classify(state))
    assert why is not None
    assert why.category == category
    assert said in why.evidence


def test_the_jobs_own_line_is_shown() -> None:
    """What failed, and how far it had come."""
    state = State("7", "FAILED", "record", final=True)
    why = why_ended(state, Ending.USER_ERROR, ExitRecord(1, line="rank 3 of 4 on b failed: ValueError: x", step=40))
    assert why is not None
    assert why.evidence == ("rank 3 of 4 on b failed: ValueError: x", "committed up to step 40")


def test_the_exception_in_a_log_is_shown_where_there_is_no_record() -> None:
    """With its place, once; a job that is not ours is not ours to restart (B094)."""
    tail = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\nValueError: bad key x\n'
    )
    state = State("7", "FAILED", "squeue", final=True)
    why = why_ended(state, Ending.USER_ERROR, None, tail, ours=False)
    assert why is not None
    assert why.evidence == ("its log: ValueError: bad key x (train.py:3)",)
    stopped = why_ended(state, Ending.STOPPED, None, "", ours=False)
    assert stopped is not None
    assert stopped.do == "to go on: submit it again"


def test_nothing_is_said_where_nothing_is_known() -> None:
    """UNKNOWN has no why."""
    assert why_ended(State("7", "UNKNOWN", "nobody", final=True), Ending.UNKNOWN) is None
