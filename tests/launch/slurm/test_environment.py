"""What reaches the ranks of a job, and what does not: secrets, variables, modules, environments, on a real Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.slurm.handing import Home
from worldsize.errors import ConfigError
from worldsize.launch import shell
from worldsize.launch.profile import Profile
from worldsize.launch.slurm.environment import carried, enter, environment
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from worldsize.testing.slurm.cluster import Cluster

BASH = shutil.which("bash") or "bash"
HUSH = "hush-8c1f0e"


@pytest.fixture
def home(slurm: Cluster, tmp_path: Path) -> Home:
    """A folder with a program in it."""
    made = Home(slurm, tmp_path)
    made.program()
    return made


def spec(**asked: Any) -> JobSpec:
    """A small job."""
    return JobSpec.of({"program": ("train.py",), **asked})


def entered(job: JobSpec, *argv: str, **env: str) -> shell.Done:
    """What the set-up of a job's tasks does before a command, with no cluster."""
    text = "\n".join([*environment(job, Profile()), f"{enter(job, Profile())} {shlex.join(argv)}"])
    return shell.call([BASH, "-u", "-c", text], {"PATH": os.defpath, **env}, timeout=20)


# --- secrets


@pytest.mark.slurm
@pytest.mark.parametrize("launcher", ["worldsize", "srun", "torchrun"])
def test_a_secrets_value_is_found_nowhere_but_in_its_file(home: Home, launcher: str) -> None:
    """It reaches every rank; script, logs, folders, Slurm's own record and the trace of set-up commands have no trace."""
    ask = ("train.py", "--launcher", launcher, "--nodes", "2", "--nproc-per-node", "1", "--secret", "TOKEN")
    shown = home.call(*ask, "--preview", env={"TOKEN": HUSH})
    job = home.job(*ask, "--setup", "set -x", "--setup", "env >&2", env={"TOKEN": HUSH})
    log = home.completed(job)
    record = home.cluster.run(["scontrol", "show", "job", "-dd", job]).out
    batch = home.cluster.run(["scontrol", "write", "batch_script", job, "-"]).out
    assert [each["env"]["TOKEN"] for each in home.seen()] == [HUSH, HUSH]
    assert not any(HUSH in text for text in (shown.out, shown.err, log, record, batch))
    kept = [path for folder in (home.path, home.cluster.folder) for path in folder.rglob("*") if path.is_file()]
    holders = {path.name for path in kept if HUSH.encode() in path.read_bytes() and path.parent.name != "seen"}
    assert holders == {"secrets.json"}
    assert (home.path / "job" / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert (home.path / "job").stat().st_mode & 0o777 == 0o700


@pytest.mark.slurm
def test_a_secret_that_is_not_set_is_refused(home: Home) -> None:
    """Before anything is queued; nothing is left."""
    done = home.call("train.py", "--secret", "TOKEN")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "secrets names what is not set here" in done.err
    assert not (home.path / "job").exists()


@pytest.mark.slurm
def test_secrets_that_others_may_read_are_not_used(home: Home) -> None:
    """A file whose mode was widened ends the job with one line."""
    job = home.job("train.py", "--secret", "TOKEN", "--begin", "now+1hour", env={"TOKEN": HUSH})
    (home.path / "job" / "secrets.json").chmod(0o644)
    home.cluster.run(["scontrol", "update", f"jobid={job}", "StartTime=now"])
    state, log = home.ended(job)
    assert state == "FAILED"
    assert "secrets.json is not its owner's alone" in log
    assert HUSH not in log


# --- variables


@pytest.mark.slurm
def test_a_job_has_what_it_was_given_and_nothing_else_of_a_shell(home: Home) -> None:
    """Variables that are named arrive as they are; others of the submitter's do not, nor those of a job around him (B012)."""
    odd = 'it\'s "$HOME" `x` \\ \n é'
    env = {"NAMED": odd, "STRAY": "1", "LC_ALL": "C.UTF-8", "SLURM_CPU_BIND": "quiet", "OMP_NUM_THREADS": "7"}
    job = home.job("train.py", "--pass-env", "NAMED", "--env", f"GIVEN={odd}", env=env)
    home.completed(job)
    found = home.seen()[0]["env"]
    assert (found["NAMED"], found["GIVEN"], found["LC_ALL"], found["HOME"]) == (odd, odd, "C.UTF-8", str(home.path))
    assert "STRAY" not in found
    assert found.get("SLURM_CPU_BIND") != "quiet"
    assert found["OMP_NUM_THREADS"] != "7"


def test_a_variable_to_pass_that_is_not_set_is_refused(tmp_path: Path) -> None:
    """A job would miss it at its first step."""
    from worldsize.launch.slurm.submit import draft

    with pytest.raises(ConfigError, match=r"pass_env names what is not set here.*NAMED"):
        draft(spec(pass_env=("NAMED",), chdir=str(tmp_path)), Profile(), environ={})


def test_modules_can_be_found_and_are_not_taken_for_loaded() -> None:
    """The function `module` and where modules are come along; which were loaded does not, as their variables do not."""
    there = {"BASH_FUNC_module%%": "() { :; }", "MODULEPATH": "/m", "LMOD_PKG": "/l", "PATH": "/bin"}
    assert carried({**there, "LOADEDMODULES": "cuda", "_LMFILES_": "x", "CUDA_HOME": "/c"}, spec()) == there


def test_a_secret_is_not_carried_whatever_its_name() -> None:
    """Slurm keeps the environment that sbatch is called with."""
    assert carried({"LC_TOKEN": HUSH, "PATH": "/bin"}, spec(secrets=("LC_TOKEN",))) == {"PATH": "/bin"}


# --- set-up


@pytest.mark.slurm
def test_setup_runs_on_every_node_and_reaches_its_ranks(home: Home) -> None:
    """What a command exports is there, with each node's own value."""
    job = home.job("train.py", "--nodes", "2", "--nproc-per-node", "2", "--setup", "export ON=$SLURMD_NODENAME")
    home.completed(job)
    assert [each["env"]["ON"] for each in home.seen()] == ["node1", "node1", "node2", "node2"]


@pytest.mark.slurm
def test_a_virtual_environment_is_the_ranks_own(home: Home) -> None:
    """Its interpreter runs them, and its commands are first on PATH; a relative path means the working folder's (B027)."""
    _environment(home.path / "env")
    job = home.job("train.py", "--venv", "env", "--nproc-per-node", "1")
    home.completed(job)
    (rank,) = home.seen()
    assert rank["python"] == f"{home.path}/env/bin/python"
    assert rank["env"]["PATH"].startswith(f"{home.path}/env/bin:")


def test_modules_are_loaded_before_variables_and_commands() -> None:
    """The user's own values win over a module's."""
    function = {"BASH_FUNC_module%%": '() { echo "module $*"; export A=module B=module; }'}
    job = spec(modules=("cuda/12",), env={"A": "mine"}, setup=('echo "$A $B"',))
    assert entered(job, "true", **function).out == "module load cuda/12\nmine module\n"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"modules": ("cuda/12",)}, "no module command for module cuda/12. Do: "),
        ({"conda": 'a"$x'}, 'there is no conda here for environment a"$x. Do: '),
        ({"venv": "/none"}, "this virtual environment is not here: /none."),
    ],
)
def test_what_is_not_on_a_node_is_one_line_with_its_name(asked: dict[str, Any], told: str) -> None:
    """And code 2: nothing was started."""
    done = entered(spec(**asked), "echo", "began")
    assert (done.code, done.out) == (2, "")
    (line,) = (line for line in done.err.splitlines() if line.startswith("worldsize: "))
    assert line.split(": ", 2)[2].startswith(told)


def test_a_module_that_cannot_be_loaded_ends_the_job() -> None:
    """The module command's own words, and ours."""
    done = entered(
        spec(modules=("nope",)), "true", **{"BASH_FUNC_module%%": "() { echo no such module >&2; return 1; }"}
    )
    assert done.code == 2
    assert done.err.splitlines()[0] == "no such module"
    assert done.err.endswith("this module cannot be loaded: nope.\n")


def test_conda_is_activated_by_its_hook(tmp_path: Path) -> None:
    """A batch shell has no function conda: the command prints it. Where there is no such environment, one line says so."""
    conda = tmp_path / "conda"
    conda.write_text(
        '#!/bin/sh\n[ "$*" = "shell.bash hook" ] && echo \'conda() { [ "$2" = good ] && export IN=$2; }\'\n'
    )
    conda.chmod(0o755)
    assert entered(spec(conda="good"), "printenv", "IN", CONDA_EXE=str(conda)).out == "good\n"
    missing = entered(spec(conda="bad"), "true", CONDA_EXE=str(conda))
    assert (missing.code, missing.err.endswith("conda has no environment bad.\n")) == (2, True)


@pytest.mark.parametrize("line", ["cat <<X", "echo 'a", "true \\", "exit 0", "f() {"])
def test_setup_that_swallows_the_program_is_no_success(line: str) -> None:
    """An open quote or here-document would end with code 0 and nothing done."""
    done = entered(spec(setup=(line,)), "echo", "began")
    assert done.code != 0 or "began" in done.out


def test_setup_may_say_anything() -> None:
    """Also the word that ends the text around it."""
    done = entered(spec(setup=("echo a\nEND_OF_SETUP() { echo b; }", "END_OF_SETUP")), "printf", "%s", "it's $HOME")
    assert done.out == "a\nb\nit's $HOME"
    only = entered(spec(setup=("cat <<'END_OF_SETUP'\nx\nEND_OF_SETUP",)), "echo", "began")
    assert only.out == "x\nbegan\n"


# --- staging


@pytest.mark.slurm
@pytest.mark.parametrize("launcher", ["worldsize", "srun"])
def test_what_is_staged_is_on_each_nodes_own_disk_while_the_job_runs(home: Home, launcher: str) -> None:
    """Copied once a node, named to the ranks and in their words, gone at the end."""
    (home.path / "data").mkdir()
    (home.path / "data" / "a.txt").write_text("samples", encoding="utf-8")
    home.program('seen["read"] = open(sys.argv[1]).read()')
    job = home.job(
        "train.py", "--launcher", launcher, "--nodes", "2", "--nproc-per-node", "2", "--stage", "data",
        words=("{stage}/data/a.txt",),
    )  # fmt: skip
    log = home.completed(job)
    ranks = home.seen()
    assert [each["read"] for each in ranks] == ["samples"] * 4
    folders = {each["env"]["WORLDSIZE_STAGE"] for each in ranks}
    assert len(folders) == 2
    assert all(each["words"] == [f"{each['env']['WORLDSIZE_STAGE']}/data/a.txt"] for each in ranks)
    assert log.count(": staged in ") == 2
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.slurm
def test_an_environment_may_come_packed(home: Home) -> None:
    """It is unpacked on each node, and its interpreter runs the ranks."""
    _environment(home.path / "env")
    with tarfile.open(home.path / "env.tar.gz", "w:gz") as packed:
        packed.add(home.path / "env", ".")
    job = home.job("train.py", "--venv", "env.tar.gz", "--nproc-per-node", "1")
    home.completed(job)
    (rank,) = home.seen()
    assert rank["python"] == f"{rank['env']['WORLDSIZE_STAGE']}/.env/bin/python"
    assert rank["env"]["PATH"].startswith(f"{rank['env']['VIRTUAL_ENV']}/bin:")


@pytest.mark.slurm
def test_a_stop_signal_reaches_a_program_with_staged_data(home: Home) -> None:
    """Who waits to remove the copies does not keep it, and passes the exit code on."""
    (home.path / "data").write_text("x", encoding="utf-8")
    home.program(
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\ntime.sleep(100)"
    )
    job = home.job("train.py", "--launcher", "srun", "--stage", "data", "--no-requeue")
    _until(lambda: "ready" in home.log(job))
    home.cluster.run(["scancel", "--batch", "--signal=USR1", job])
    _, log = home.ended(job)
    assert "ended with code 7" in log


# --- what differs since


@pytest.mark.slurm
def test_another_environment_is_told_or_refused(home: Home) -> None:
    """What was installed at submit is compared at the start: a few lines, or with strict_env the end."""
    before = home.path / "extra" / "thing-1.0.dist-info"
    before.mkdir(parents=True)
    ask = ("train.py", "--nproc-per-node", "1", "--pass-env", "PYTHONPATH", "--begin", "now+1hour")
    outcomes = []
    for strict in ((), ("--strict-env",)):
        job = home.job(*ask, *strict, env={"PYTHONPATH": str(home.path / "extra")})
        shutil.rmtree(home.path / "extra")
        (home.path / "extra" / "thing-2.0.dist-info").mkdir(parents=True)
        home.cluster.run(["scontrol", "update", f"jobid={job}", "StartTime=now"])
        outcomes.append(home.ended(job))
        shutil.rmtree(home.path / "extra")
        before.mkdir(parents=True)
        shutil.rmtree(home.path / "job")
    (told, log), (refused, strict_log) = outcomes
    assert (told, refused) == ("COMPLETED", "FAILED")
    assert "the environment is not the one at submit:\nworldsize:   thing: 1.0 then, 2.0 now\n" in log
    assert "strict_env is set. Found: thing: 1.0 then, 2.0 now." in strict_log
    assert "ended with code 2" in strict_log
    assert home.seen()[0]["env"]["WORLDSIZE_FINGERPRINT"] == str(home.path / "job" / "fingerprint.json")


@pytest.mark.slurm
@pytest.mark.parametrize("launcher", ["worldsize", "srun", "torchrun"])
def test_ranks_have_their_share_of_the_cpus(home: Home, launcher: str) -> None:
    """By every launcher the same, where the user set nothing; a value of his own, or of the site's, is left alone (B050)."""
    (home.path / "site.yaml").write_text("threads: 5\n", encoding="utf-8")
    ask = ("train.py", "--launcher", launcher, "--nproc-per-node", "1", "--cpus-per-task", "2")
    found = []
    for more in ((), ("--profile", "site.yaml"), ("--profile", "site.yaml", "--env", "OMP_NUM_THREADS=3")):
        home.completed(home.job(*ask, *more))
        found.append(home.seen()[0]["env"]["OMP_NUM_THREADS"])
        shutil.rmtree(home.path / "job")
    assert found == [str(min(2, len(os.sched_getaffinity(0)))), "5", "3"]


def _environment(path: Path) -> None:
    """A virtual environment that sees what this one has."""
    done = shell.call([sys.executable, "-m", "venv", "--without-pip", str(path)], {}, timeout=60)
    assert done.code == 0, done.err
    (site,) = path.glob("lib/python3*/site-packages")
    here = [entry for entry in sys.path if "site-packages" in entry or entry.endswith("/src")]
    (site / "here.pth").write_text("\n".join(here), encoding="utf-8")


def _until(fact: Any) -> None:
    end = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
