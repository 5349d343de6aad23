"""The code that a job runs is the code that was submitted; and what is looked at before anything is queued."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.slurm import lines
from tests.launch.slurm.handing import Home
from worldsize.errors import ConfigError
from worldsize.launch import shell
from worldsize.launch.profile import Profile
from worldsize.launch.slurm import submit
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.preparing import resolved, whole
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

WHICH = "import helper\nseen['version'] = helper.VERSION, 'old'\nseen['data'] = open('data.txt').read()"


@pytest.fixture
def home(slurm: Cluster, tmp_path: Path) -> Home:
    """A folder of code, with a module beside the program and data beside both."""
    made = Home(slurm, tmp_path)
    made.program(WHICH, "src/train.py")
    (tmp_path / "src" / "__init__.py").touch()
    (tmp_path / "src" / "helper.py").write_text("VERSION = 'old'\n", encoding="utf-8")
    (tmp_path / "helper.py").write_text("VERSION = 'old at the root'\n", encoding="utf-8")
    (tmp_path / "data.txt").write_text("old", encoding="utf-8")
    return made


def edit(home: Home) -> None:
    """What somebody does while a job waits."""
    for path in (home.path / "src" / "helper.py", home.path / "helper.py", home.path / "src" / "train.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("old", "new"), encoding="utf-8")
    (home.path / "data.txt").write_text("new", encoding="utf-8")


def released(home: Home, *options: str) -> dict[str, Any]:
    """Submit held, edit, release; what the program then finds."""
    job = home.job(*options, "--launcher", "srun", "--begin", "now+1hour")
    edit(home)
    home.cluster.run(["scontrol", "update", f"jobid={job}", "StartTime=now"])
    home.completed(job)
    return home.seen()[0]


@pytest.mark.slurm
def test_a_job_that_waits_runs_the_code_that_was_submitted(home: Home) -> None:
    """Program and imports are those of then; data and working folder are those of now."""
    found = released(home, "src/train.py", "--snapshot", "--code-root", ".")
    assert (found["version"], found["data"]) == (["old", "old"], "new")
    assert found["path"][0] == str(home.path / "job" / "code" / "src")
    assert found["file"] == str(home.path / "job" / "code" / "src" / "train.py")


@pytest.mark.slurm
def test_a_module_too(home: Home) -> None:
    """The working folder, which Python would look at first, does not win."""
    found = released(home, "-m", "src.train", "--snapshot")
    assert (found["version"], found["data"]) == (["old at the root", "old"], "new")
    assert found["path"][0] == str(home.path / "job" / "code")


@pytest.mark.slurm
def test_without_it_a_job_runs_what_is_there(home: Home) -> None:
    """Search path and program are as in a local run (B027)."""
    found = released(home, "src/train.py")
    assert found["version"] == ["new", "new"]
    assert found["path"][0] == str(home.path / "src")


def spec(tmp_path: Path, **asked: Any) -> JobSpec:
    """A small job in a folder."""
    (tmp_path / "train.py").touch()
    return whole(JobSpec.of({"program": ("train.py",), "chdir": str(tmp_path), **asked}))


def test_paths_are_absolute(tmp_path: Path) -> None:
    """A batch script lies elsewhere and begins elsewhere (B027)."""
    found = spec(tmp_path, venv="env", stage=("data",), run_dir="runs/a")
    assert (found.venv, found.stage) == (f"{tmp_path}/env", (f"{tmp_path}/data",))
    assert resolved(found, tmp_path / "job", {}).env["WORLDSIZE_RUN_DIR"] == f"{tmp_path}/runs/a"


def test_a_sites_variables_are_taken_where_they_are_set(tmp_path: Path) -> None:
    """Not refused where they are not, and never a secret of the job."""
    job, environ = spec(tmp_path, secrets=("TOKEN",)), {"SCRATCH": "/s", "TOKEN": "hush"}
    assert resolved(job, tmp_path / "job", environ, ("SCRATCH", "WORK", "TOKEN")).env == {"SCRATCH": "/s"}


def test_python_path_leads_into_the_copy(tmp_path: Path) -> None:
    """Where it lay in the code; other places stay."""
    job = spec(tmp_path, snapshot=True, env={"PYTHONPATH": f"{tmp_path}/lib:/opt/lib"})
    assert resolved(job, tmp_path / "job", {}).env["PYTHONPATH"] == f"{tmp_path}/job/code/lib:/opt/lib"


def test_a_script_outside_of_the_code_is_refused(tmp_path: Path) -> None:
    """It would not be copied."""
    (tmp_path / "code").mkdir()
    with pytest.raises(ConfigError, match=r"train\.py is not in the code"):
        resolved(spec(tmp_path, snapshot=True, code_root="code"), tmp_path / "job", {})


# --- before anything is queued


def handed(tmp_path: Path, sbatch: str, **asked: Any) -> submit.Ticket:
    """Hand a job over to a false sbatch."""
    (tmp_path / "tools").mkdir(exist_ok=True)
    environ = lines.commands(tmp_path / "tools", sbatch=sbatch) | {"STRAY": "1", "TOKEN": "hush"}
    environ["PATH"] = f"{tmp_path}/tools:/usr/bin:/bin"
    made = submit.draft(spec(tmp_path, **asked), Profile(), tmp_path / "job", environ=environ)
    return submit.submit(made, Client(environ), tmp_path / "state")


def test_jobs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop in a shell submits several of one name."""
    monkeypatch.setattr("worldsize.launch.slurm.submit.time.strftime", lambda _: "now")
    folders = []
    for _ in range(3):
        folder = submit.draft(spec(tmp_path), Profile(), environ={}).where.folder
        folders.append(folder.name)
        (tmp_path / "jobs" / folder.name).mkdir(parents=True)
    assert folders == ["train-now", "train-now-2", "train-now-3"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"program": ("none.py",)}, "there is no script none.py"),
        ({"venv": "none"}, "venv is no virtual environment"),
        ({"stage": ("none",)}, "to be staged is not there"),
        ({"secrets": ("TOKEN",), "launcher": "horovodrun", "nodes": 2}, "by ssh: .*secrets.*use launcher srun"),
        ({"secrets": ("NONE",)}, "secrets names what is not set here"),
        ({"output": "train.py/x.out"}, "the log cannot be written"),
        ({"snapshot": True, "code_file_suffixes": (".yaml",)}, "there is no code"),
        ({"run_dir": "run", "nproc_per_node": 3}, r"3 ranks, global_batch 4 = 2 micro-batches of 2"),
    ],
)
def test_what_is_wrong_is_told_before_sbatch_is_asked(tmp_path: Path, asked: dict[str, Any], told: str) -> None:
    """And nothing is left."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": {"global_batch": 4, "micro_batch": 2}}))
    with pytest.raises(ConfigError, match=told):
        handed(tmp_path, f"touch {tmp_path}/asked; echo 7", **asked)
    assert not (tmp_path / "job").exists()
    assert not (tmp_path / "asked").exists()


def test_folders_of_logs_are_made(tmp_path: Path) -> None:
    """Slurm opens logs before the script runs, and makes none (B032)."""
    opens = f"echo x > {tmp_path}/logs/deep/o-7.out && echo x > {tmp_path}/other/e.err && echo 7"
    ticket = handed(tmp_path, opens, output="logs/deep/o-%j.out", error="other/e.err")
    assert ticket.job == "7"


@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", r"a\=0", "t&st", "ü$x`y`"])
def test_folders_of_any_name_run_a_script_from_anywhere(tmp_path: Path, name: str) -> None:
    """Sbatch copies the script and starts it elsewhere: what it names is found, no name is executed (B024, B027)."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "beside.py").write_text("WORD = 'found'", encoding="utf-8")
    code = "import beside, sys; print(beside.WORD, open('train.cfg').read(), sys.path[0])"
    (folder / "train.cfg").write_text("read", encoding="utf-8")
    made = submit.draft(spec(folder, setup=("true",)), Profile(), folder / "job", environ={})
    (folder / "train.py").write_text(code, encoding="utf-8")
    (folder / "job").mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    # A task as Slurm starts it: in the job's working folder, with the words of the program behind the last --.
    run = f'while [ "$1" != -- ]; do shift; done; shift; exec {sys.executable} "$@"'
    env = lines.commands(tools, srun=run) | {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    spool = tmp_path / "spool"
    spool.write_text(made.text, encoding="utf-8")
    chdir = next(line for line in made.text.splitlines() if line.startswith("#SBATCH --chdir="))
    done = shell.call(
        ["/bin/bash", "-c", f"cd {chdir.removeprefix('#SBATCH --chdir=')} && exec /bin/bash {spool}"], env
    )
    assert f"found read {folder}" in done.out.splitlines(), done
    assert "foo" not in done.out.splitlines()
    assert list(folder.glob("job/exit-7-0"))


def test_sbatch_sees_where_one_is_and_nothing_else(tmp_path: Path) -> None:
    """What it is called with is what a job begins with, and what Slurm keeps."""
    handed(tmp_path, f"env > {tmp_path}/seen; echo 7", secrets=("TOKEN",))
    names = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert names - {"_", "PWD", "SHLVL", "OLDPWD"} == {"PATH", "HOME"}


def test_what_sbatch_says_beside_an_id_is_kept(tmp_path: Path) -> None:
    """For whoever submitted: it is a note, no error (B023)."""
    assert handed(tmp_path, "echo 'sbatch: using default partition x' >&2; echo 7").notes.endswith("partition x")


def test_all_that_sbatch_says_is_shown(tmp_path: Path) -> None:
    """A refusal with a banner of the site around it, on one line, without a traceback (B022)."""
    said = "echo 'Welcome to the site' >&2; echo 'sbatch: error: no account' >&2; exit 1"
    with pytest.raises(Exception, match="Welcome to the site sbatch: error: no account"):
        handed(tmp_path, said)
