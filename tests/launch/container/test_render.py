"""What each runtime is told: fixed command lines, safe quoting, and where Slurm is spoken to."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import sys
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch import shell
from worldsize.launch.container.box import CLEARED
from worldsize.launch.container.registry import render
from worldsize.launch.container.spec import RUNTIMES
from worldsize.launch.profile import CONTAINERS, Profile
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

BASH = shutil.which("bash") or "bash"
PLACE = Where(PurePosixPath("/runs/job 'x"), "python3", host_python="/host/python")
WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
CLEAR = " ".join(f"-u {name}" for name in CLEARED)
DATA = ("/data", "/data", ""), ("/a b", "/in", "ro")

GOLDEN = {
    "apptainer": f"env {CLEAR} apptainer exec --nv --bind /data:/data --bind '/a b:/in:ro' --pwd /home/u --writable-tmpfs "
    "/i.sif env PYTHONNOUSERSITE=1 A='x y' ",
    "charliecloud": "/bin/sh -c 'USER=${USER:-$(id -un)} exec \"$@\"' sh "
    f"env {CLEAR} ch-run --unset-env LD_LIBRARY_PATH -b /data:/data -b '/a b:/in' -c /home/u --writable-tmpfs "
    "/i.sif -- env PYTHONNOUSERSITE=1 A='x y' ",
    "pyxis": f"env {CLEAR} PYTHONNOUSERSITE=1 A='x y' ",
}
HANDED = {
    "docker": "docker run --rm --network=host --ipc=host --pid=host --ulimit memlock=-1 --gpus all --volume /data:/data "
    "--volume '/a b:/in:ro' --workdir /home/u --writable-tmpfs --user \"$(id -u):$(id -g)\"",
    "podman": "podman run --rm --network=host --ipc=host --pid=host --ulimit memlock=-1 --device nvidia.com/gpu=all "
    "--volume /data:/data --volume '/a b:/in:ro' --workdir /home/u --writable-tmpfs "
    '$([ "$(id -u)" = 0 ] || echo --userns=keep-id)',
    "enroot": "enroot start --mount /data:/data --mount '/a b:/in:ro' --writable-tmpfs ",
}


def job(
    runtime: str, *, image: str = "/i.sif", count: int | None = 4, words: tuple[str, ...] = (), **asked: Any
) -> JobSpec:
    """A small job in a container."""
    settings = {"binds": ("/data", "/a b:/in:ro"), "env": {"A": "x y"}, "options": ("--writable-tmpfs",)} | asked
    box = {"image": image, "runtime": runtime, **settings}
    return JobSpec.of(
        {"program": ("train.py", *words), "nodes": 2, "chdir": "/home/u", "gpus_per_node": count, "container": box}
    )


@pytest.mark.parametrize("runtime", GOLDEN)
def test_a_runtime_that_hands_the_environment_in(runtime: str) -> None:
    """Its command line, with what speaks of the host's Python taken away (B005: no Slurm in it)."""
    assert f"{shlex.join(render(job(runtime), Profile()).argv)} " == shlex.join(shlex.split(GOLDEN[runtime])) + " "


@pytest.mark.parametrize("runtime", HANDED)
def test_a_runtime_that_begins_with_the_images_variables(runtime: str) -> None:
    """Bash gives it the names that are set on the node."""
    bash, flag, text, name = render(job(runtime), Profile()).argv
    assert (bash, flag, name) == ("/bin/bash", "-c", "worldsize")
    assert text.splitlines()[0] == f"__run=({HANDED[runtime]})"
    assert text.splitlines()[-1].startswith('exec "${__run[@]}" ')
    assert text.endswith(" PYTHONNOUSERSITE=1 'A=x y' \"$@\"")


def test_pyxis_is_options_of_srun() -> None:
    """Image, mounts, folder and home."""
    assert render(job("pyxis"), Profile()).srun == (
        "--container-image=/i.sif",
        "--container-mounts=/data:/data,/a b:/in:ro",
        "--container-workdir=/home/u",
        "--container-mount-home",
        "--writable-tmpfs",
    )


@pytest.mark.parametrize(
    ("gpus", "of", "word"), [(None, None, None), (2, None, "--nv"), (2, "amd", "--rocm"), (2, "none", None)]
)
def test_gpus_are_there_where_the_job_has_some(gpus: int | None, of: str | None, word: str | None) -> None:
    """Or as the container says."""
    argv = render(job("apptainer", count=gpus, gpus=of), Profile()).argv
    assert [found for found in argv if found in ("--nv", "--rocm")] == ([word] if word else [])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_variable_that_the_job_sets_stays(runtime: str) -> None:
    """PYTHONPATH only when asked."""
    spec = job(runtime).model_copy(update={"env": {"PYTHONPATH": "/code"}})
    assert "PYTHONPATH" in shlex.join(render(job(runtime), Profile()).argv)
    assert "PYTHONPATH" not in shlex.join(render(spec, Profile()).argv)


def test_the_profile_names_the_runtime() -> None:
    """A job need not know it; where nobody says it, that is an error; both tables are one."""
    spec = JobSpec.of({"program": ("t.py",), "container": "/i.sif"})
    assert "singularity" in render(spec, Profile.of({"container": "singularity"})).argv
    with pytest.raises(ConfigError, match="which runtime is not said"):
        render(spec, Profile())
    assert set(RUNTIMES) == set(CONTAINERS)


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ({"image": "i", "bind": "/x"}, "binds"),
        ({"image": "i", "binds": "x"}, "write /host"),
        ({}, "image"),
        (3, "image"),
    ],
)
def test_a_wrong_container_is_said(box: Any, says: str) -> None:
    """One line, with the setting."""
    with pytest.raises(ConfigError, match=says):
        JobSpec.of({"program": ("t.py",), "container": box})


@given(st.sampled_from(RUNTIMES), WORD, st.lists(WORD, max_size=3), st.lists(WORD, max_size=2))
def test_any_script_is_one_that_bash_accepts(runtime: str, value: str, words: list[str], options: list[str]) -> None:
    """Whatever stands in images, values, paths and arguments."""
    try:
        spec = job(
            runtime, image=f"/i{value}", env={"A": value}, options=options, words=tuple(words), binds=(f"/d{value}",)
        )
    except ConfigError:
        return
    done = shell.call([BASH, "-n"], {}, text=script(spec, Profile(), PLACE), timeout=20)
    assert (done.code, done.err) == (0, "")
    for word in filter(lambda word: word.startswith("run="), render(spec, Profile()).argv):
        assert shell.call([BASH, "-n"], {}, text=word, timeout=20).code == 0


def tool(folder: Path, name: str, text: str) -> None:
    """A program of ours on PATH."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


SAYS = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.mark.parametrize("runtime", ["docker", "podman", "enroot"])
def test_names_and_words_reach_the_runtime(tmp_path: Path, runtime: str) -> None:
    """Variables of Slurm, NCCL and ours by name, the host's own not; the command word for word."""
    tool(tmp_path, runtime, SAYS)
    env = {
        "SLURM_PROCID": "1",
        "NCCL_DEBUG": "INFO",
        "WORLDSIZE_JOB": "7",
        "X": "a\nb",
        "PYTHONPATH": "/p",
        "TMPDIR": "/t",
    }
    argv = (*render(job(runtime, env={"A": "$HOME 'x'"}), Profile()).argv, "python3", "a b", "", "$HOME", "it's")
    words, seen = json.loads(shell.call(argv, {**env, "PATH": f"{tmp_path}:{os.environ['PATH']}"}).out)
    names = [name for option, name in pairwise(words) if option == "--env"]
    assert {"SLURM_PROCID", "NCCL_DEBUG", "WORLDSIZE_JOB", "X"} <= set(names)
    assert not {"PYTHONPATH", "TMPDIR", "PATH", "PWD"} & set(names)
    assert seen["X"] == "a\nb"
    assert words[-6:] == ["A=$HOME 'x'", "python3", "a b", "", "$HOME", "it's"]


def test_the_queue_is_told_outside(tmp_path: Path) -> None:
    """A runtime that hides Slurm from the training changes nothing for the batch script: scontrol is called once (B040)."""
    folder, calls = tmp_path / "job", tmp_path / "calls"
    folder.mkdir()
    record = "printf 'committed 3\\nstopped 3\\n' >\"$WORLDSIZE_EXIT_FILE\"; exit 75"
    tool(tmp_path, "srun", '#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done; exec "$@"\n')
    tool(tmp_path, "ch-run", f"#!/bin/sh\nPATH=/nowhere\ncommand -v scontrol && exit 9\n{record}\n")
    tool(tmp_path, "scontrol", f'#!/bin/sh\necho "$@" >>{calls}\nexit 1\n')
    spec = job("charliecloud").model_copy(update={"chdir": str(tmp_path)})
    text = script(spec, Profile(), Where(folder, "python3", host_python=sys.executable))
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "USER": "u",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "a,b",
    }
    done = shell.call([BASH, "-c", text], env, timeout=60, cwd=tmp_path)
    lines = calls.read_text().splitlines() if calls.exists() else [done.out + done.err]
    assert [line for line in lines if line.startswith("requeue")] == ["requeue 5"], lines
