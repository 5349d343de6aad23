"""What is known of a job: its ticket, Slurm's word and its own records, joined."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.launch.slurm import lines
from worldsize.launch.endings import Ending
from worldsize.launch.slurm import known, states
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.known import Desk
from worldsize.launch.slurm.states import ExitRecord
from worldsize.launch.slurm.tickets import SPEC, Ticket, recall, remember

if TYPE_CHECKING:
    from pathlib import Path

GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_SACCT = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


def row(**values: str) -> str:
    """One job as squeue prints it."""
    return "".join(f"{values.get(name, '')}{states.END}" for name in states.QUEUE_FIELDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of job 12, which was handed over a moment ago."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / SPEC).write_text(json.dumps({"job_name": "digits", "chdir": str(tmp_path)}))
    remember(Ticket("12", str(folder), "digits", time.time() - 300), tmp_path / "state")
    return folder


def desk(tmp_path: Path, squeue: str = GONE, sacct: str = NO_SACCT) -> Desk:
    """Slurm that says this."""
    bin_ = tmp_path / "bin"
    bin_.mkdir(exist_ok=True)
    return Desk(Client(lines.commands(bin_, squeue=squeue, sacct=sacct)), tmp_path / "state")


def listed(tmp_path: Path, **values: str) -> Desk:
    """Squeue lists job 12 with these values."""
    (tmp_path / "squeue.txt").write_text(row(**{"JobID": "12", "ArrayJobID": "12", "ArrayTaskID": "N/A", **values}))
    return desk(tmp_path, f"/bin/cat '{tmp_path}/squeue.txt'")


@pytest.mark.parametrize(
    ("text", "code", "ending"),
    [
        ("committed 4\nended 0\n", 0, None),
        ("committed 4\nstopped 5\nended 1\n", 75, None),
        ("stopped 5\n", 75, None),
        ("committed 4\n", None, None),
        ("something new\nended 3\n", 3, None),
        ("ended 1\nfailed out-of-memory-(GPU) node2 rank 3 of 4 on node2 failed: x\n", 1, Ending.GPU_MEMORY),
        ("failed hang - no step for 600 s\n", 1, Ending.HANG),
    ],
)
def test_what_a_job_wrote(tmp_path: Path, text: str, code: int | None, ending: Ending | None) -> None:
    """The exit code of its training, which launchers flatten, and how it ended."""
    path = tmp_path / "exit-12-1"
    path.write_text(text)
    found = known.record(path)
    assert found is not None
    assert (found.code, found.ending, found.restarts) == (code, ending, 1)


def test_a_job_that_wrote_nothing(tmp_path: Path) -> None:
    """No record, and no error."""
    (tmp_path / "exit-12-0").touch()
    assert [known.record(tmp_path / f"exit-12-{attempt}") for attempt in (0, 1)] == [None, None]


def test_the_newest_attempt_counts(tmp_path: Path, folder: Path) -> None:
    """By its number, the tenth after the ninth; accounting that is absent is said (B034)."""
    for attempt, code in ((9, 1), (10, 0)):
        (folder / f"exit-12-{attempt}").write_text(f"ended {code}\n")
    (found,) = desk(tmp_path).look(["12"])["12"]
    assert (found.state.name, found.state.source, found.code) == ("COMPLETED", "record", 0)
    assert found.state.note == "accounting is disabled on this cluster"


def test_a_record_of_an_earlier_attempt_does_not_tell_how_this_one_ended(tmp_path: Path, folder: Path) -> None:
    """The restart count of squeue says which attempt is meant."""
    (folder / "exit-12-0").write_text("stopped 5\nended 75\n")
    (found,) = listed(tmp_path, State="FAILED", RestartCnt="1", exit_code="256").look(["12"])["12"]
    assert (found.ending, found.code) == (Ending.USER_ERROR, 1)


def test_the_log_of_the_newest_attempt_tells(tmp_path: Path, folder: Path) -> None:
    """What an earlier one printed does not."""
    log = "worldsize: job 12, attempt 0, on 1 nodes: a\nCUDA out of memory\nworldsize: job 12, attempt 1, on 1 nodes: a\n"
    (folder / "slurm-12.out").write_text(log + "Traceback: rendezvous timed out\n")
    (found,) = listed(tmp_path, State="FAILED", RestartCnt="1", exit_code="256").look(["12"])["12"]
    assert found.ending is Ending.RENDEZVOUS


def test_an_id_that_came_again_is_another_job(tmp_path: Path, folder: Path) -> None:
    """Submitted long after our ticket and never requeued: nothing of ours is believed of it (B034)."""
    (folder / "exit-12-0").write_text("ended 0\n")
    later = str(int(time.time()) + 86400)
    (found,) = listed(tmp_path, State="RUNNING", RestartCnt="0", SubmitTime=later, Name="digits").look(["12"])["12"]
    assert (found.folder, found.ticket, found.record) == (None, None, None)


def test_a_requeued_job_is_still_ours(tmp_path: Path, folder: Path) -> None:
    """Slurm gives it a new submission time."""
    later = str(int(time.time()) + 86400)
    (found,) = listed(tmp_path, State="RUNNING", RestartCnt="1", SubmitTime=later, Name="digits").look(["12"])["12"]
    assert found.folder == folder


def test_a_job_that_just_ended_is_not_given_up(tmp_path: Path, folder: Path) -> None:
    """Nobody lists it, and it was handed over a moment ago (B034)."""
    remember(Ticket("13", str(folder), "digits", time.time()), tmp_path / "state")
    (found,) = desk(tmp_path).look(["13"])["13"]
    assert (found.state.name, found.state.final) == ("UNKNOWN", False)


def test_members_that_slurm_has_forgotten(tmp_path: Path, folder: Path) -> None:
    """Each has its own record."""
    for task, code in ((0, 0), (1, 4)):
        (folder / f"exit-12_{task}-0").write_text(f"ended {code}\n")
    assert {each.job: each.code for each in desk(tmp_path).look(["12"])["12"]} == {"12_0": 0, "12_1": 4}


def test_the_job_that_goes_on_is_remembered(tmp_path: Path, folder: Path) -> None:
    """Its batch script submitted it, and no ticket was written then; the last of the chain is found."""
    (folder / "exit-12-0").write_text("stopped 5\nended 75\n")
    (folder / "next-12").write_text("15;far\n")
    here = desk(tmp_path)
    (last,) = here.newest(here.find(["12"]))
    ticket = recall("15", tmp_path / "state")
    assert ticket is not None
    assert (last.job, ticket.folder, ticket.former) == ("15", str(folder), "12")


def test_a_record_is_plain() -> None:
    """What is printed for programs holds everything."""
    found = known.Known(
        states.State("7", "FAILED", "record", final=True), record=ExitRecord(1, line="x", ending=Ending.HANG)
    )
    assert json.loads(json.dumps(found.to_json()))["record"]["ending"] == "hang"
