"""Several hosts over ssh: real sshds on machines of their own, one world, one end."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import finish, script, start, until
from worldsize.launch import shell
from worldsize.launch.ssh.host import Line

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from worldsize.testing.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

SAYS = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
values = {name: os.environ[name] for name in (*names, "TOKEN", "WORLDSIZE_X")}
said = [os.fsencode(word).hex() for word in sys.argv[2:]]
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    json.dump({"host": os.uname().nodename, "cwd": os.getcwd(), "words": said, "gpus": gpus, **values}, file)
"""
FAILS = """
if os.environ["RANK"] == "3": raise ValueError("bad key x")
time.sleep(600)
"""
WORKS = """
import subprocess
child = subprocess.Popen(["sleep", "6" + os.environ["MARK"]])
open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
time.sleep(600)
"""
SAVES = """
asked = []
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, frame: asked.append(signal.Signals(number).name))
open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
while not asked: time.sleep(0.01)
open(sys.argv[1] + "/saved" + os.environ["RANK"], "w").write(asked[0])
sys.exit(75)
"""
BYTES = ("a b", "", "$HOME `x` *", "it's", "--", "é漢", "line\nline", "%h %n", os.fsdecode(b"\xff"))


def run(
    slurm: Cluster, folder: Path, program: str, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`worldsize run --hosts` in this folder, for two hosts of two ranks if nothing else is said."""
    script(folder, program)
    hosts = () if any(word.startswith("--hosts") for word in options) else ("--hosts", "node1:2,node2:2")
    words = [*hosts, "--ssh-args", f"-F {slurm.ssh_config}", *options]
    own = words.pop() if words[-1] == "train.py" else "train.py"
    return start(*words, own, folder, cwd=folder, env=env)


def left(slurm: Cluster, text: str) -> str:
    """Processes of both hosts whose command line has this text."""
    found = [slurm.exec(node, ["pgrep", "-af", text]).out for node in ("node1", "node2")]
    return "".join(line for out in found for line in out.splitlines(keepends=True) if "pgrep" not in line)


def up(folder: Path) -> None:
    """Wait until all four ranks are at work."""
    until(lambda: all((folder / f"up{rank}").exists() for rank in range(4)), 60)


@pytest.mark.parametrize("shell_", ["ssh", "pdsh"])
def test_two_hosts_are_one_world(slurm: Cluster, tmp_path: Path, shell_: str) -> None:
    """Ranks, addresses, variables, the working folder; every byte of every argument."""
    folder = tmp_path / "a 'b"
    folder.mkdir()
    script(folder, SAYS)
    hosts = (
        "--hosts",
        "node1:2,node2:4",
        "--include",
        "node1@node2:1,3",
        "--remote-shell",
        shell_,
        "--env",
        "TOKEN=a b",
    )
    env = {"WORLDSIZE_X": "x y", "PYTHONPATH": "/no where"}
    process = start(
        *hosts, "--ssh-args", f"-F {slurm.ssh_config}", "--", "train.py", folder, *BYTES, cwd=folder, env=env
    )
    ended = finish(process)
    assert (ended.code, ended.err) == (0, "")
    ranks = [json.loads((folder / str(rank)).read_text()) for rank in range(4)]
    assert [(one["host"], one["LOCAL_RANK"], one["GROUP_RANK"]) for one in ranks] == [
        ("node1", "0", "0"), ("node1", "1", "0"), ("node2", "0", "1"), ("node2", "1", "1"),
    ]  # fmt: skip
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks}) == 1
    assert {(one["WORLD_SIZE"], one["cwd"], one["TOKEN"], one["WORLDSIZE_X"]) for one in ranks} == {
        ("4", str(folder), "a b", "x y")
    }
    assert all(one["words"] == [os.fsencode(word).hex() for word in BYTES] for one in ranks)
    assert [one["gpus"] for one in ranks[2:]] == ["1,3", "1,3"]


@pytest.mark.parametrize("shell_", ["ssh", "pdsh"])
def test_the_first_failure_ends_all(slurm: Cluster, tmp_path: Path, shell_: str) -> None:
    """One line, one traceback, the code of that rank; nobody is left (B037, B038)."""
    ended = finish(run(slurm, tmp_path, FAILS, "--remote-shell", shell_))
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    line = ended.err.splitlines()[-1]
    assert "rank 3 of 4 on node2" in line
    assert "ValueError: bad key x" in line
    until(lambda: not left(slurm, str(tmp_path)), 20)


@pytest.mark.parametrize("shell_", ["ssh", "pdsh"])
def test_nothing_survives_the_starter(slurm: Cluster, tmp_path: Path, shell_: str) -> None:
    """Killed by SIGKILL, it leaves no process on either host, children of children included."""
    mark = f"{os.getpid()}{len(shell_)}"
    process = run(slurm, tmp_path, WORKS, "--remote-shell", shell_, "--env", f"MARK={mark}")
    up(tmp_path)
    assert left(slurm, f"sleep 6{mark}").count("\n") == 4
    process.kill()
    until(lambda: not left(slurm, f"(sleep 6{mark}|{tmp_path}|worldsize host)"), 30)


def test_ranks_save_when_the_connection_breaks(slurm: Cluster, tmp_path: Path) -> None:
    """The end of one ssh is a stop for all; the starter says which host it was."""
    process = run(slurm, tmp_path, SAVES)
    up(tmp_path)
    argv = f"ssh .*-- node2 .*{tmp_path.name}"
    done = shell.call(["pkill", "-f", "-P", str(process.pid), argv], {"PATH": os.environ["PATH"]})
    assert done.code == 0
    ended = finish(process)
    assert "host node2 (node 1): the connection was lost" in ended.err
    assert ended.code == 75
    assert all((tmp_path / f"saved{rank}").read_text() == "SIGTERM" for rank in range(4))


@pytest.mark.parametrize(
    ("name", "shell_"), [("SIGTERM", "ssh"), ("SIGUSR1", "ssh"), ("SIGINT", "ssh"), ("SIGUSR1", "pdsh")]
)
def test_a_stop_reaches_every_rank_and_75_comes_back(slurm: Cluster, tmp_path: Path, name: str, shell_: str) -> None:
    """Sent to the starter alone, it is every rank's (B041)."""
    process = run(slurm, tmp_path, SAVES, "--remote-shell", shell_)
    up(tmp_path)
    process.send_signal(getattr(signal, name))
    ended = finish(process)
    assert (ended.code, ended.err) == (
        75,
        "worldsize: stopped on request, everything committed; start it again to go on\n",
    )
    assert all((tmp_path / f"saved{rank}").read_text() == name for rank in range(4))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--hosts", "node1,nowhere.invalid"), "host nowhere.invalid: its name is not known"),
        (("--python", "/no/python"), ": no interpreter /no/python"),
        (("--python", "/usr/bin/python3"), ": worldsize is not installed for /usr/bin/python3"),
        (("nope.py",), "there is no program 'nope.py'"),
        (
            ("--remote-shell", "pdsh", "--hosts", "node1,nowhere.invalid"),
            "host nowhere.invalid: its name is not known",
        ),
    ],
)
def test_a_host_that_is_not_ready_starts_nothing(
    slurm: Cluster, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    """One line that names it, code 2, and no process anywhere."""
    script(tmp_path, WORKS)
    program = () if options == ("nope.py",) else ("train.py",)
    hosts = () if "--hosts" in options else ("--hosts", "node1,node2")
    ended = finish(start(*hosts, "--ssh-args", f"-F {slurm.ssh_config}", *options, *program, tmp_path, cwd=tmp_path))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert says in ended.err
    assert not list(tmp_path.glob("up*"))
    until(lambda: not left(slurm, "worldsize host"), 20)


def test_a_key_that_is_not_known_is_said(slurm: Cluster, tmp_path: Path) -> None:
    """Nobody is asked: there is no terminal on the way."""
    known = f"-F {slurm.ssh_config} -o StrictHostKeyChecking=yes"
    ended = finish(start("--hosts", "node1,node2", "--ssh-args", known, script(tmp_path, SAYS), cwd=tmp_path))
    assert ended.code == 2
    assert ended.err.replace("node2", "node1").startswith("worldsize: host node1: its host key is not known here.")


def test_a_folder_that_a_host_lacks_is_said(slurm: Cluster) -> None:
    """Host and folder, before anything starts: /dev/shm is each machine's own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        argv = ["--hosts", "node1,node2", "--ssh-args", f"-F {slurm.ssh_config}", "-m", "this"]
        ended = finish(start(*argv, cwd=Path(folder)))
        assert ended.code == 2
        assert f"host node1: the working folder is not there. Found: {folder}" in ended.err.replace("node2", "node1")


def test_a_silent_starter_is_taken_for_dead() -> None:
    """A cut cable closes no pipe: a host waits for signs of life only so long."""
    ends, starter = os.pipe()
    line = Line(ends, ends, patience=0.1)
    os.write(starter, b"\nwords\n")
    assert [line.next(), line.next(), line.next()] == ["", "words", None]
    os.close(starter)
    os.close(ends)


def test_values_stand_on_no_command_line(slurm: Cluster, tmp_path: Path) -> None:
    """A variable that is passed by its name alone goes over standard input."""
    secret = "s3cr3t-value"
    process = run(slurm, tmp_path, WORKS, "--env", "TOKEN", "--env", "MARK=1", env={"TOKEN": secret})
    up(tmp_path)
    seen = shell.call(["ps", "-eww", "-o", "args"], {"PATH": os.environ["PATH"]}).out
    process.terminate()
    finish(process)
    assert str(tmp_path) in seen
    assert secret not in seen
    assert sys.executable in seen


def test_a_missing_pdsh_is_one_line(tmp_path: Path) -> None:
    """Nothing is started (B086)."""
    words = ("--remote-shell", "pdsh", "--hosts", "node1,node2", script(tmp_path, WORKS))
    ended = finish(start(*words, cwd=tmp_path, env={"PATH": "/nowhere"}))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert ended.err.startswith("worldsize: pdsh cannot be started")
