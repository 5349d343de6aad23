"""What a batch script makes of its preflight: which step it starts, or why none."""

from __future__ import annotations

import shutil
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError
from worldsize.launch import shell
from worldsize.launch.endings import Ending
from worldsize.launch.profile import Profile
from worldsize.launch.slurm.after import Attempt, decide
from worldsize.launch.slurm.exitfile import Failed, parse
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

BASH = shutil.which("bash") or "bash"
SITE = Profile()
RECORD = 'printf "%s\\n" "$*" >>"$SEEN/${0##*/}"'


def job(**asked: Any) -> JobSpec:
    """A small one with a preflight."""
    return JobSpec.of({"program": ("train.py",), "nodes": 2, "chdir": "/", "preflight": True, **asked})


def ran(folder: Path, answer: str, **asked: Any) -> tuple[int, dict[str, str]]:
    """The exit code of its script where the doctor answers this; what each command was given."""
    tools, seen = folder / "tools it's", folder / "seen"
    seen.mkdir()
    tools.mkdir()
    bodies = {
        "srun": "",
        "scontrol": "",
        "squeue": "",
        "sbatch": "echo 8",
        "python": f'case "$3" in doctor) echo {answer} ;; esac',
    }
    for name, body in {**bodies, "sleep": ""}.items():
        (tools / name).write_text(f"#!/bin/sh\n{RECORD}\n{body}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    text = script(job(**asked), SITE, Where(folder / "job", "/venv/python", str(tools / "python")))
    names = {"JOB_ID": "7", "JOB_NUM_NODES": "3", "JOB_NODELIST": "n[1-3]"}
    values = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SEEN": str(seen),
        **{f"SLURM_{key}": each for key, each in names.items()},
    }
    done = shell.call([BASH, "-c", text], values, timeout=20)
    return done.code, {path.name: path.read_text(encoding="utf-8") for path in seen.iterdir()}


def test_a_healthy_job_starts_its_step(tmp_path: Path) -> None:
    """On all nodes that the step asks for."""
    code, given = ran(tmp_path, "go")
    assert (code, "--exclude" in given["srun"]) == (0, False)


def test_a_step_leaves_a_bad_node_out(tmp_path: Path) -> None:
    """The job has a spare one."""
    code, given = ran(tmp_path, "go n2", spare_nodes=1)
    assert code == 0
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --exclude=n2 " in given["srun"]


def test_a_job_comes_again_without_a_bad_node(tmp_path: Path) -> None:
    """Slurm is told which; no step begins."""
    code, given = ran(tmp_path, "again n2,n3")
    assert (code, "srun" in given) == (EXIT_STOPPED, False)
    assert "requeue 7\nupdate jobid=7 excnodelist=n2,n3\n" in given["scontrol"]


def test_where_no_job_may_come_again_another_follows(tmp_path: Path) -> None:
    """Without those nodes."""
    code, given = ran(tmp_path, "again n2", requeue=False)
    assert (code, "srun" in given) == (EXIT_STOPPED, False)
    assert "--dependency=afterany:7 --exclude=n2 " in given["sbatch"]


def test_a_job_without_good_nodes_ends(tmp_path: Path) -> None:
    """As failed."""
    code, given = ran(tmp_path, "end n2")
    assert (code, "srun" in given) == (EXIT_FAILED, False)
    assert (tmp_path / "job" / "exit-7-0").read_text(encoding="utf-8") == "ended 1\n"


def test_a_preflight_that_cannot_be_made_keeps_nobody_from_training(tmp_path: Path) -> None:
    """The doctor has died, say."""
    code, given = ran(tmp_path, "")
    assert code == 0
    assert "train.py" in given["srun"]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12))
def test_any_run_folder_is_one_word(folder: str) -> None:
    """Bash accepts the script."""
    text = script(job(run_dir=folder, venv=folder), SITE, Where(PurePosixPath("/runs/job 'x"), "/venv/bin/python"))
    done = shell.call([BASH, "-n"], {}, text=text, timeout=20)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"preflight": False, "spare_nodes": 1}, "without preflight"),
        ({"spare_nodes": 1, "launcher": "horovodrun"}, "spare_nodes"),
        ({"spare_nodes": 1, "program": (), "exec_command": "srun x"}, "spare_nodes"),
        ({"gpus_per_node": "4,2"}, "the nodes differ"),
        ({"exclude_bad_nodes": False}, "found and kept"),
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any], told: str) -> None:
    """Before anything is queued."""
    with pytest.raises(ConfigError, match=told):
        job(**asked)


def test_spare_nodes_are_asked_for(tmp_path: Path) -> None:
    """Besides those that the step uses."""
    text = script(job(spare_nodes=2), SITE, Where(tmp_path, "python"))
    assert "#SBATCH --nodes=4" in text
    assert "srun --nodes=2 " in text


def test_nodes_that_a_preflight_left_out_stay_out_after_a_failure(tmp_path: Path) -> None:
    """Slurm's list of excluded nodes is replaced, not added to."""
    (tmp_path / "exit-7-0").write_text("left-out n9 network: slow host\ncommitted 5\n", encoding="utf-8")
    what = Failed(Ending.NODE_FAILURE, "n1", "ECC error")
    assert decide(Attempt(tmp_path, "7", "0", 1), what, 1).without == ("n1", "n9")
    assert parse("left-out n9 slow\nleft-out n8 slow\n").left_out == ("n9", "n8")
