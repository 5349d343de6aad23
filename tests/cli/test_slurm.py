"""`worldsize jobs`, `status`, `why`, `nodes`: what they print of a recorded cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.launch.slurm import lines
from worldsize.cli.main import commands

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with commands that print what was recorded."""
    scripts = {
        "squeue": f"case \"$*\" in *=all*) file=over;; *) file=waiting;; esac; /bin/cat '{lines.SEEN}/22.05'-$file.squeue",
        "sacct": f"/bin/cat '{lines.SEEN}/22.05.sacct'",
        "sinfo": f"/bin/cat '{lines.SEEN}/22.05.sinfo'",
        "scontrol": f"/bin/cat '{lines.SEEN}/22.05.partitions'",
    }
    monkeypatch.setenv("PATH", lines.commands(tmp_path, **scripts)["PATH"])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # other tests' jobs have these numbers too
    monkeypatch.chdir("/")


def said(*args: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(commands, args, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_jobs() -> None:
    """A line each, the reason in words."""
    assert "pending: asks for more time than the partition allows" in said("jobs", "--all")


def test_jobs_for_programs() -> None:
    """Every fact."""
    assert len(json.loads(said("jobs", "--all", "--json"))["jobs"]) == len(lines.queue())


def test_status_of_a_job_that_failed() -> None:
    """Its state, and where its log is."""
    told = said("status", "18").splitlines()
    assert told[0] == "18: failed: exit code 3"
    assert "    log        /home/ana/digits/log.18" in told


def test_status_of_a_job_that_only_accounting_knows() -> None:
    """It is asked second."""
    assert json.loads(said("status", "7", "--json"))["7"][0]["source"] == "sacct"


def test_why_a_job_ended() -> None:
    """Category, evidence, what to do."""
    assert said("why", "24").splitlines() == [
        "24: ended: time limit",
        "    Slurm's state: TIMEOUT",
        "    exit code 0, signal 15",
        "    its limit was 00:01:00",
        "    Do: to go on: submit it again, with more --time if it committed nothing",
    ]


def test_nodes() -> None:
    """The drained one, and the command that brings it back."""
    assert said("nodes").splitlines()[-1].endswith("scontrol update nodename=node2 state=resume")


def test_nodes_of_one_partition() -> None:
    """Only those."""
    told = json.loads(said("nodes", "-p", "short", "--json"))
    assert [node["name"] for node in told["nodes"]] == ["node1", "node2"]
