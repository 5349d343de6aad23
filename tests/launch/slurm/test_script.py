"""The batch script: what sbatch reads, what bash does with it, and what reaches the program."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from contextlib import nullcontext
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import EXIT_STOPPED, ConfigError
from worldsize.launch import shell
from worldsize.launch.profile import Profile
from worldsize.launch.slurm.directives import directives
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

BASH = shutil.which("bash") or "bash"
SITE = Profile()
PLACE = Where(PurePosixPath("/runs/job 'x"), "/venv/bin/python")
WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def spec(**asked: Any) -> JobSpec:
    """A small job."""
    return JobSpec.of({"program": ("train.py",), "nodes": 2, "chdir": "/home", **asked})


def lines(**asked: Any) -> list[str]:
    """The directives of a small job."""
    return directives(spec(**asked), SITE, PLACE)


@given(st.lists(WORD, max_size=4), WORD.filter(lambda word: word.strip() and "\n" not in word and "\r" not in word))
def test_any_script_is_one_that_bash_accepts(words: list[str], comment: str) -> None:
    """Whatever stands in arguments and names."""
    try:
        job = spec(program=("train.py", *words), comment=comment)
    except ConfigError:
        return  # control characters in a comment are refused
    done = shell.call([BASH, "-n"], {}, text=script(job, SITE, PLACE), timeout=20)
    assert (done.code, done.err) == (0, "")


def test_log_is_appended_to() -> None:
    """A requeued job keeps what its first attempt said (B031)."""
    assert "#SBATCH --open-mode=append" in lines()


@pytest.mark.parametrize(("asked", "line"), [(True, "--requeue"), (False, "--no-requeue"), (None, "--requeue")])
def test_requeue_is_always_said(asked: bool | None, line: str) -> None:
    """A site's default decides nothing; where the spec is silent, the profile does."""
    assert f"#SBATCH {line}" in lines(requeue=asked)


def test_all_of_a_nodes_memory_is_sbatchs_zero() -> None:
    """`all` is a word of ours."""
    assert "#SBATCH --mem=0" in lines(mem="all")


def test_what_a_profile_skips_is_not_rendered() -> None:
    """A site may forbid a directive, and want others."""
    site = Profile.of({"skip": ("open-mode",), "add": ("--gres-flags=enforce-binding",)})
    found = directives(spec(), site, PLACE)
    assert not any("open-mode" in line for line in found)
    assert "#SBATCH --gres-flags=enforce-binding" in found


@pytest.mark.parametrize(
    ("array", "fits"), [("0-999", True), ("0-1000", False), ("5,1000-1001%7", False), ("1-9:4%5000", True)]
)
def test_an_array_larger_than_the_cluster_takes_is_refused(array: str, fits: bool) -> None:
    """MaxArraySize is one more than the largest index."""
    with nullcontext() if fits else pytest.raises(ConfigError, match="max_array_size 1000"):
        directives(spec(array=array), Profile.of({"max_array_size": 1000}), PLACE)


def test_nodes_with_different_gpus_are_parts_of_one_job() -> None:
    """Equal neighbours together; what concerns the whole job is said once."""
    found = lines(nodes=3, gpus_per_node="4,4,2", time="10")
    at = found.index("#SBATCH hetjob")
    assert [line for line in found[:at] if "nodes" in line or "gpus" in line] == [
        "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4",
    ]  # fmt: skip
    assert found[at + 1 :] == [
        "#SBATCH --job-name=train", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=2",
    ]  # fmt: skip
    text = script(spec(nodes=3, gpus_per_node="4,4,2"), SITE, PLACE)
    assert "srun --het-group=0,1 " in text
    assert "--nproc-per-node=4,4,2" in text


@pytest.fixture
def ran(tmp_path: Path) -> Any:
    """Run a job's script with a false srun and scontrol; returns exit code and what they were given."""
    tools = tmp_path / "tools"
    tools.mkdir()

    def tool(name: str, body: str) -> None:
        path = tools / name
        path.write_text(f"#!{sys.executable}\nimport json, os, sys, time, signal\nfolder = {str(tmp_path)!r}\n{body}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(job: JobSpec, srun: str, **env: str) -> tuple[int, dict[str, list[Any]]]:
        log = "open(os.path.join(folder, '{0}.log'), 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        tool("srun", log.format("srun") + srun)
        tool("scontrol", log.format("scontrol") + "print(os.environ.get('FACTS', ''))\n")
        tool("sleep", "")
        text = script(job, SITE, Where(tmp_path / "job", sys.executable))
        (tmp_path / "script.sh").write_text(text, encoding="utf-8")
        base = {"PATH": f"{tools}:{os.defpath}", "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"}
        names = {**base, "SLURM_JOB_NODELIST": "n[1-2]", **env}
        code = shell.call([BASH, str(tmp_path / "script.sh")], names, timeout=60).code
        logs = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("*.log")}
        return code, {name: [json.loads(line) for line in found] for name, found in logs.items()}

    return run


WORDS = ("", " ", "a b", "it's", "$HOME", "`x`", "*", "é漢", "--x=1 2", '"', "\\", "a\nb", "x" * 20_000)


def test_arguments_reach_the_step_byte_for_byte(ran: Any) -> None:
    """No shell on the way reads them (B025)."""
    _, seen = ran(spec(program=("train.py", *WORDS)), "")
    words = seen["srun"][0]
    assert words[words.index("--") + 1 :] == ["train.py", *WORDS]


def test_the_steps_exit_code_is_the_scripts(ran: Any) -> None:
    """Jobs that depend on this one must see its failure (B038)."""
    code, seen = ran(spec(), "sys.exit(3)")
    assert code == 3
    assert "scontrol" not in seen


STOPPED = "open(os.environ['WORLDSIZE_EXIT_FILE'], 'w').write('stopped 12\\n'); sys.exit(1)"


def test_a_stopped_member_of_an_array_requeues_itself_alone(ran: Any) -> None:
    """By its own name: the number of the array would take all of them (B039)."""
    _, seen = ran(spec(array="0-3"), STOPPED, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="2")
    assert seen["scontrol"] == [["requeue", "12_2"]]


def test_a_record_decides_and_not_the_code(ran: Any) -> None:
    """Launchers make 1 of every code."""
    code, seen = ran(spec(), STOPPED)
    assert code == EXIT_STOPPED
    assert seen["scontrol"] == [["requeue", "12"]]


SAVES = (
    "done = []\nsignal.signal(signal.SIGUSR1, lambda *_: done.append(1))\nos.kill(os.getppid(), signal.SIGUSR1)\n"
    "end = time.monotonic() + 20\n"
    "while not done and time.monotonic() < end: time.sleep(0.01)\n"
    "time.sleep(0.3)\nif done: open(os.environ['WORLDSIZE_EXIT_FILE'], 'w').write('stopped 7\\n')\nsys.exit(9)"
)
"""A step that has the script told to stop, hears of it, and saves."""


def test_a_stop_signal_reaches_the_step_and_its_end_is_waited_for(ran: Any) -> None:
    """A batch shell that waits in the foreground would hear it too late (B041)."""
    code, seen = ran(spec(), SAVES)
    assert code == EXIT_STOPPED
    assert seen["scontrol"] == [["show", "job", "--oneliner", "12"], ["requeue", "12"]]


@pytest.mark.parametrize(
    ("facts", "again"),
    [
        ("JobState=RUNNING Reason=None Restarts=0 BatchFlag=1", True),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0 BatchFlag=1", True),
        ("JobState=COMPLETING Reason=None Restarts=0 BatchFlag=1", False),
        ("JobState=COMPLETING Reason=None Restarts=1 BatchFlag=1", False),
    ],
    ids=["signalled", "time limit", "cancelled", "requeued by Slurm"],
)
def test_only_who_is_not_cancelled_nor_back_already_is_put_back(ran: Any, facts: str, again: bool) -> None:
    """Scancel is no request to come again."""
    code, seen = ran(spec(), SAVES, FACTS=f"JobId=12 {facts}")
    assert code == EXIT_STOPPED
    assert (["requeue", "12"] in seen["scontrol"]) == again


def test_the_cpus_of_a_task_are_said_to_srun_once(ran: Any) -> None:
    """Since 22.05 it does not take them from the job; no variable says another number (B014)."""
    _, seen = ran(spec(cpus_per_task=8), "")
    assert [word for word in seen["srun"][0] if word.startswith("--cpus-per-task")] == ["--cpus-per-task=8"]
    assert "SRUN_CPUS_PER_TASK" not in script(spec(cpus_per_task=8), SITE, PLACE)


def test_a_rank_that_fails_ends_the_step_and_one_that_ends_well_does_not_at_once(ran: Any) -> None:
    """Whatever the site's own settings are (B037)."""
    _, seen = ran(spec(), "")
    words = seen["srun"][0]
    assert "--kill-on-bad-exit=1" in words
    assert [word for word in words if word.startswith("--wait=")]


def test_the_steps_exit_code_is_left_in_the_record(ran: Any, tmp_path: Path) -> None:
    """For whoever asks where there is no accounting (B038)."""
    ran(spec(), "sys.exit(3)")
    assert "ended 3" in (tmp_path / "job" / "exit-12-0").read_text().splitlines()
