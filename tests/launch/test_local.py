"""One machine: what the ranks find, and how the command ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.commands import alive, finish, lines, run, script, start, until

if TYPE_CHECKING:
    from pathlib import Path

TELL = "print(json.dumps({'env': dict(os.environ), 'argv': sys.argv[1:], 'path': sys.path[0], 'name': __name__}))"


def told(out: str) -> dict[int, dict[str, Any]]:
    """What TELL said, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]
    return {int(one["env"]["RANK"]): one for one in found}


def test_every_rank_finds_the_contract_of_torchrun(tmp_path: Path) -> None:
    """Every variable that torchrun sets is there, and the two ranks differ only where they should."""
    ended = run("-n", "2", "--rdzv-id", "7", "--max-restarts", "3", script(tmp_path, TELL))
    ranks = {rank: one["env"] for rank, one in told(ended.out).items()}
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "WORLDSIZE_LAUNCHER": "worldsize",
        "PYTHONUNBUFFERED": "1",
    }
    for rank in (0, 1):
        own = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        assert (common | own).items() <= ranks[rank].items()
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    assert ranks[0]["TORCHELASTIC_ERROR_FILE"] != ranks[1]["TORCHELASTIC_ERROR_FILE"]


def test_schedulers_of_outside_are_hidden_from_the_ranks(tmp_path: Path) -> None:
    """Slurm's and MPI's rank variables are gone; the job id and the user's MPI settings stay (API.md 16)."""
    leaks: tuple[str, ...] = (
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_TASKS",
        "PMI_RANK",
    )
    leaks += ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    env = dict.fromkeys(leaks, "0") | {"SLURM_JOB_ID": "12", "OMPI_MCA_btl": "tcp", "SLURM_CONF": "/c"}
    found = told(run(script(tmp_path, TELL), env=env).out)[0]["env"]
    assert not set(leaks) & set(found)
    assert (found["SLURM_JOB_ID"], found["OMPI_MCA_btl"], found["SLURM_CONF"]) == ("12", "tcp", "/c")


def test_threads_share_the_processors(tmp_path: Path) -> None:
    """B050: two ranks get half of the allowed processors each."""
    found = told(run("-n", "2", script(tmp_path, TELL)).out)
    half = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [found[rank]["env"]["OMP_NUM_THREADS"] for rank in (0, 1)] == [half, half]


def test_threads_of_the_user_stay(tmp_path: Path) -> None:
    """B050: OMP_NUM_THREADS=3 exported is 3 in the ranks."""
    assert told(run(script(tmp_path, TELL), env={"OMP_NUM_THREADS": "3"}).out)[0]["env"]["OMP_NUM_THREADS"] == "3"


ARGS = (
    "",
    " ",
    "a b",
    "it's",
    '"',
    "$HOME",
    "`x`",
    "*",
    "~",
    "!",
    "é漢",
    "--x=1 2",
    "--nproc-per-node",
    "-n",
    "x" * 20_000,
)


def test_arguments_arrive_byte_for_byte(tmp_path: Path) -> None:
    """B025: no argument is expanded, joined, dropped or read as an option of ours."""
    assert told(run(script(tmp_path, TELL), *ARGS).out)[0]["argv"] == list(ARGS)


def test_arguments_that_are_no_text_arrive(tmp_path: Path) -> None:
    """B025: bytes that are not UTF-8 arrive too."""
    path = script(tmp_path, "print([os.fsencode(arg) for arg in sys.argv[1:]])")
    assert run(path, os.fsdecode(b"\xff\xfe\x01")).out == f"{[bytes([255, 254, 1])]}\n"


@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", "a\\=0", "t&st", "$HOME", "é漢", "-x"])
def test_folders_with_odd_names(tmp_path: Path, name: str) -> None:
    """B024: a script in such a folder runs there, and its log lies in another one like it."""
    folder = tmp_path / name
    folder.mkdir()
    script(folder, "import beside; print(os.getcwd())")
    (folder / "beside.py").write_text("", encoding="utf-8")
    logs = tmp_path / f"logs {name}"
    ended = run(f"--log-dir={logs}", "train.py", cwd=folder)
    assert (ended.code, ended.out) == (0, f"{folder}\n")
    assert (logs / "attempts/0/rank-0000.log").read_text(encoding="utf-8") == ended.out


def test_a_relative_script_imports_its_neighbours_and_finds_its_config(tmp_path: Path) -> None:
    """B027: the working folder stays, and sys.path[0] is the script's folder, as with plain python."""
    (tmp_path / "experiments").mkdir()
    script(tmp_path / "experiments", "import beside; print(open(sys.argv[1]).read(), sys.path[0])", "x.py")
    (tmp_path / "experiments" / "beside.py").write_text("", encoding="utf-8")
    (tmp_path / "experiments" / "x.yml").write_text("found", encoding="utf-8")
    ended = run("experiments/x.py", "experiments/x.yml", cwd=tmp_path)
    assert ended.out == f"found {tmp_path / 'experiments'}\n"


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    """`-m` finds the module from the working folder, and its arguments are its own."""
    script(tmp_path, TELL, "prog.py")
    found = told(run("-m", "prog", "-n", "5", cwd=tmp_path).out)[0]
    assert (found["argv"], found["path"], found["name"]) == (["-n", "5"], str(tmp_path), "__main__")


def test_an_executable_runs_by_itself(tmp_path: Path) -> None:
    """A shell script with its own first line is executed, and so is a command that is found on PATH."""
    path = tmp_path / "go"
    path.write_text('#!/bin/sh\necho "rank $RANK: $1"\n', encoding="utf-8")
    path.chmod(0o700)
    assert run(path, "a  b").out == "rank 0: a  b\n"
    assert run("--no-python", "echo", "hi").out == "hi\n"


def test_output_of_several_ranks_names_the_rank(tmp_path: Path) -> None:
    """Whole lines on the console, each with its rank, on the stream where it was printed."""
    path = script(tmp_path, "print('out'); print('a' + os.environ['RANK'], file=sys.stderr)")
    ended = run("-n", "2", path)
    assert sorted(ended.out.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(ended.err.splitlines()) == ["[rank 0] a0", "[rank 1] a1"]


def test_output_of_one_rank_is_untouched(tmp_path: Path) -> None:
    """One rank: no prefix, no line taken apart; a last line without its end stays so."""
    path = script(tmp_path, r"sys.stdout.buffer.write(b'a\rb\x00\n\nc')")
    assert run(path).out == "a\nb\x00\n\nc"  # text mode reads \r as a line's end


def test_logs_keep_every_byte(tmp_path: Path) -> None:
    """The file of a rank has what it wrote, without prefix, whatever the bytes are."""
    path = script(tmp_path, r"sys.stdout.buffer.write(bytes(range(256)) * 1000 + b'no end')")
    assert run("-n", "2", "--log-dir", tmp_path / "logs", path).code == 0
    for rank in (0, 1):
        assert (tmp_path / f"logs/attempts/0/rank-000{rank}.log").read_bytes() == bytes(range(256)) * 1000 + b"no end"


def test_a_log_folder_that_is_used_again_keeps_what_it_has(tmp_path: Path) -> None:
    """B031: the second start writes its own attempt; nothing is truncated."""
    path = script(tmp_path, "print(sys.argv[1])")
    for word in ("first", "second"):
        run("--log-dir", tmp_path / "logs", path, word)
    found = [(tmp_path / f"logs/attempts/{n}/rank-0000.log").read_text(encoding="utf-8") for n in (0, 1)]
    assert found == ["first\n", "second\n"]


def test_output_comes_while_the_ranks_run(tmp_path: Path) -> None:
    """B033: output is unbuffered: the first line is there long before the program ends."""
    process = start("-n", "2", script(tmp_path, "print('first'); time.sleep(600)"))
    assert process.stdout is not None
    assert process.stdout.readline().endswith("first\n")
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130


FAIL = """
def load(key):
    raise ValueError(f"bad key {key}")
if os.environ["RANK"] == "1":
    load("x")
time.sleep(600)
"""


def test_the_first_failure_is_said_once(tmp_path: Path) -> None:
    """B094: rank, host, exception, file:line and log in the last line; one traceback; the rest is ended."""
    ended = run("-n", "4", "--log-dir", tmp_path / "logs", script(tmp_path, FAIL))
    last = ended.err.splitlines()[-1]
    log = tmp_path / "logs/attempts/0/rank-0001.log"
    host = socket.gethostname()
    assert last == f"worldsize: rank 1 of 4 on {host} failed: ValueError: bad key x (train.py:4 in load); log: {log}"
    assert (ended.code, ended.err.count("Traceback")) == (1, 1)
    assert log.read_text(encoding="utf-8").count("Traceback") == 1
    assert ended.took < 10


def test_many_failing_ranks_give_one_traceback(tmp_path: Path) -> None:
    """B094: four ranks that all raise: one traceback on the console, four in the logs."""
    path = script(tmp_path, "raise ValueError('bad key x')")
    ended = run("-n", "4", "--log-dir", tmp_path / "logs", path)
    assert ended.err.count("Traceback") == 1
    assert ended.err.count("worldsize: ") == 1
    logs = [(tmp_path / f"logs/attempts/0/rank-000{rank}.log").read_text(encoding="utf-8") for rank in range(4)]
    assert any("Traceback" in log for log in logs)


def test_one_failing_rank_gives_one_traceback(tmp_path: Path) -> None:
    """B094: without prefixes it is printed once too, where Python prints it."""
    ended = run(script(tmp_path, "raise ValueError('bad key x')"))
    assert (ended.code, ended.err.count("Traceback"), ended.err.count("worldsize: ")) == (1, 1, 1)


def test_a_rank_that_dies_ends_the_others_and_its_code_is_ours(tmp_path: Path) -> None:
    """B037: rank 1 leaves with 7 while rank 0 sleeps: the command returns 7 at once, and rank 0 is gone."""
    text = f"open({str(tmp_path / 'pid')!r} + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
    text += "if os.environ['RANK'] == '1': os._exit(7)\ntime.sleep(600)"
    ended = run("-n", "2", script(tmp_path, text))
    assert ended.code == 7
    assert ended.took < 10
    pid = lines(tmp_path / "pid0")
    assert not pid or not alive(int(pid[0]))


def test_a_killed_rank_is_said_in_words(tmp_path: Path) -> None:
    """Promise 6: SIGKILL of a rank gives 137 and a line that says who kills like that."""
    ended = run("-n", "2", script(tmp_path, "os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\ntime.sleep(600)"))
    assert ended.code == 137
    assert re.search(r"rank 1 of 2 on \S+ failed: killed by SIGKILL: the kernel's out-of-memory killer", ended.err)


def test_an_exit_code_comes_with_the_last_line_that_was_printed(tmp_path: Path) -> None:
    """A program that leaves without an exception (argparse) is quoted."""
    ended = run("-n", "2", script(tmp_path, "sys.exit('unknown flag --foo')"))
    assert ended.code == 1
    assert "failed: exit code 1: unknown flag --foo" in ended.err


def test_a_stubborn_peer_is_killed_after_its_grace(tmp_path: Path) -> None:
    """A rank that ignores SIGTERM does not keep a failed job alive."""
    text = "signal.signal(15, signal.SIG_IGN)\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)"
    ended = run("-n", "2", "--peer-grace", "500ms", script(tmp_path, text))
    assert ended.code == 3
    assert ended.took < 5


def test_a_rank_that_ends_early_and_well_disturbs_nobody(tmp_path: Path) -> None:
    """B037: code 0 of one rank is no reason to end the others."""
    text = f"path = {str(tmp_path / 'done')!r}\nif os.environ['RANK'] == '0': open(path, 'w').close(); sys.exit()\n"
    text += "while not os.path.exists(path): time.sleep(0.01)\ntime.sleep(0.2)\nprint('late')"
    ended = run("-n", "2", script(tmp_path, text))
    assert (ended.code, ended.out) == (0, "[rank 1] late\n")


def test_a_traceback_of_a_program_that_lives_on_is_printed(tmp_path: Path) -> None:
    """What a program only logs reaches the console, and is not taken for its failure."""
    text = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nprint('alive')"
    ended = run("-n", "2", script(tmp_path, text))
    assert ended.code == 0
    assert ended.err.count("ZeroDivisionError: division by zero") == 2


def test_a_busy_port_changes_nothing(tmp_path: Path) -> None:
    """B044: somebody listens on 29500, and the job runs on another port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", 29500))
        server.listen()
        found = told(run("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29500", script(tmp_path, TELL)).out)
    assert found[0]["env"]["MASTER_PORT"] != "29500"


def test_a_port_that_was_asked_for_and_is_taken_is_refused(tmp_path: Path) -> None:
    """B044: --master-port is kept or refused with its number, never replaced."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        ended = run("--master-port", str(port), script(tmp_path, TELL))
    assert ended.code != 0
    assert f"worldsize: port {port} is not free on this host" in ended.err
    assert told(run("--master-port", str(port), script(tmp_path, TELL)).out)[0]["env"]["MASTER_PORT"] == str(port)


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    """Nothing is started, and the working folder is named."""
    ended = run("nope.py", cwd=tmp_path)
    assert ended.code == 2
    assert f"there is no program 'nope.py'. Found: working folder {tmp_path}" in ended.err


def test_the_temporary_logs_of_a_good_run_are_removed(tmp_path: Path) -> None:
    """Nothing is left behind after success; after a failure the logs stay."""
    env = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    run(script(tmp_path, "pass"), env=env)
    assert list((tmp_path / "tmp").iterdir()) == []
    run(script(tmp_path, "sys.exit(1)"), env=env)
    assert len(list((tmp_path / "tmp").rglob("rank-0000.log"))) == 1


def test_standard_input_reaches_rank_0(tmp_path: Path) -> None:
    """What is piped into the command is rank 0's to read; the others read nothing."""
    import subprocess

    path = script(tmp_path, "print(repr(sys.stdin.read()))")
    command = [sys.executable, "-m", "worldsize", "run", "-n", "2", str(path)]
    out = subprocess.run(command, input="words", text=True, capture_output=True, check=True).stdout
    assert sorted(out.splitlines()) == ["[rank 0] 'words'", "[rank 1] ''"]


def test_nobody_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """SIGKILL of the command ends its ranks and their children, even those that ignore every other signal."""
    text = f"""
    import subprocess
    for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid, file=open({str(tmp_path / "pids")!r} + os.environ["RANK"], "w"), flush=True)
    time.sleep(600)
    """
    process = start("-n", "2", script(tmp_path, text))
    files = [tmp_path / f"pids{rank}" for rank in (0, 1)]
    until(lambda: all(lines(file) for file in files))
    pids = [int(word) for file in files for word in lines(file)[0].split()]
    assert all(map(alive, pids))
    process.kill()
    until(lambda: not any(map(alive, pids)), timeout=5)
    finish(process)


def test_children_of_ranks_end_with_the_job(tmp_path: Path) -> None:
    """A process that a failed rank leaves behind is ended too."""
    text = f"import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w')"
    text += ".write(str(child.pid))\nsys.exit(3)"
    assert run(script(tmp_path, text)).code == 3
    until(lambda: not alive(int(lines(tmp_path / "pid")[0])), timeout=5)
