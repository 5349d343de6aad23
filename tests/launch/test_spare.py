"""The interpreter that stands by: its forks become the program and nothing else, and it outlives nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.launch.commands import alive, clean, finish, run, script, start, until
from worldsize.launch import supervisor
from worldsize.launch.loop import Loop
from worldsize.launch.spare import Forked, Spares

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMITS = """
import worldsize.runtime.report as report
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
report.committed("here", attempt)
"""

FACTS = """
import json, os, pickle, sys, threading
class Own: pass
names = {name: str(value).partition(" at 0x")[0] for name, value in globals().items() if name.startswith("__")}
frame = sys._getframe().f_code
print(json.dumps([names, sys.argv, sys.path, sys.orig_argv, str(sys.flags), dict(os.environ), os.getcwd()], sort_keys=True))
print(frame.co_filename, frame.co_name, pickle.loads(pickle.dumps(Own())).__class__ is Own)
print(sys.modules["__main__"].__dict__ is globals(), threading.current_thread().name, sys.stdin.read())
"""


def cold(argv: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    """The program as Python starts it: code, output, errors."""
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def everything(pipe: int) -> str:
    """What comes until the other side closes."""
    os.set_blocking(pipe, True)
    with open(pipe, encoding="utf-8", closefd=False) as file:
        return file.read()


@contextmanager
def standby(argv: list[str], like: int = 1, *, commits: bool = False) -> Iterator[Spares]:
    """One that imported in another environment than its forks get."""
    loop = Loop()
    with closing(loop), closing(Spares(loop, argv)) as spares:
        spares.warm(like, clean({"RANK": "other", "LEFT": "over"}), commits=commits)
        yield spares


def fork(spares: Spares, env: dict[str, str]) -> Forked:
    """A fork that stands by no longer."""
    forked = spares.order(env)
    assert forked is not None
    return forked


def warm(argv: list[str], env: dict[str, str], like: int = 1, *, commits: bool = False) -> tuple[int, str, str]:
    """The same in a fork."""
    with standby(argv, like, commits=commits) as spares, closing(spares.take()), closing(fork(spares, env)) as child:
        out, err = everything(child.stdout), everything(child.stderr)
        until(lambda: child.code is not None)
        assert child.code is not None
        return child.code, out, err


@pytest.mark.parametrize(
    "words", [["train.py"], ["./pack/../train.py", "a", ""], ["-m", "pack", "b"], ["-m", "pack.mod"]]
)
def test_the_program_finds_what_python_would_have_given_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Scripts and modules: `__main__`, arguments, search path, flags, environment, frames: no difference."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    for name in ("train.py", "pack/__main__.py", "pack/mod.py"):
        (tmp_path / name).write_text(FACTS, encoding="utf-8")
    (tmp_path / "pack/__init__.py").touch()
    argv, env = [sys.executable, "-u", *words], clean({"RANK": "3", "ODD": "\udcff\n"})
    cold(argv, env)  # leaves what it compiles, and then both find it
    assert warm(argv, env) == cold(argv, env)


@pytest.mark.parametrize(
    "text",
    [
        "def deep():\n    raise ValueError('no')\ndeep()",
        "sys.exit(3)",
        "sys.exit('said')",
        "os.kill(os.getpid(), 9)",
        "os._exit(4)",
        "sys.excepthook = lambda *what: print('hook', what[1])\n1 / 0",
        "import atexit, threading; atexit.register(print, 'last')\nthreading.Timer(0.1, lambda: print(__name__)).start()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError('worse') from error",
    ],
)
def test_the_program_ends_as_python_would_end_it(tmp_path: Path, text: str) -> None:
    """Exit codes, tracebacks without a frame of ours, hooks, threads and what is registered for the end."""
    argv = [sys.executable, "-u", str(script(tmp_path, text))]
    assert warm(argv, clean()) == cold(argv, clean())


def test_ctrl_c_ends_the_program_by_its_signal(tmp_path: Path) -> None:
    """A KeyboardInterrupt that nobody catches is death by SIGINT, to whoever waits."""
    argv = [sys.executable, "-u", str(script(tmp_path, "os.kill(os.getpid(), 2)\ntime.sleep(60)"))]
    assert warm(argv, clean())[0] == cold(argv, clean())[0] == -signal.SIGINT


def test_processes_that_import_main_again_find_it(tmp_path: Path) -> None:
    """Multiprocessing's spawn, as DataLoader workers may use it, runs functions of the script."""
    text = """
    import multiprocessing
    def double(x): return 2 * x
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(double, [21]))
    """
    argv = [sys.executable, "-u", str(script(tmp_path, text))]
    assert warm(argv, clean()) == (0, "[42]\n", "")


def pid_of(spares: Spares) -> int:
    """The process that stands by."""
    assert spares._standby is not None
    return spares._standby.child.pid


def test_one_that_is_not_there_any_more_is_not_used(tmp_path: Path) -> None:
    """An interpreter that was killed while it stood by forks nothing; ranks are then started as ever, and another warmed."""
    with standby([sys.executable, "-u", str(script(tmp_path, ""))]) as spares, closing(spares.take()):
        pid = pid_of(spares)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        assert spares.order(clean()) is None
        spares.warm(1, clean(), commits=False)
        assert pid_of(spares) != pid


def test_one_that_is_still_importing_is_waited_for(tmp_path: Path) -> None:
    """A failure that comes before it is ready waits for it: it began earlier than any other."""
    with standby([sys.executable, "-u", str(script(tmp_path, "print(5)"))]) as spares:
        assert spares._standby is not None
        assert not spares._standby.ready
        with closing(spares.take()), closing(fork(spares, clean())) as child:
            assert everything(child.stdout) == "5\n"


def test_one_serves_all_ranks_and_all_attempts(tmp_path: Path) -> None:
    """Two attempts of two ranks out of one interpreter, in the process group of their attempt, each with its own code."""
    argv = [sys.executable, "-u", str(script(tmp_path, "sys.exit(int(os.environ['RANK']))"))]
    codes = []
    with standby(argv) as spares:
        pid = pid_of(spares)
        for first in (0, 2):
            with closing(spares.take()) as team:
                ranks = [fork(spares, clean({"RANK": str(first + number)})) for number in range(2)]
                assert {os.getpgid(rank.pid) for rank in ranks if alive(rank.pid)} <= {team.number}
                until(lambda: all(rank.code is not None for rank in ranks))  # noqa: B023 - used at once
                codes += [rank.code for rank in ranks]
                for rank in ranks:
                    rank.close()
        assert pid_of(spares) == pid
    assert codes == [0, 1, 2, 3]


def test_what_its_attempt_ends_says_how_it_ended(tmp_path: Path) -> None:
    """The end of an attempt kills forks, and what they started, but not what stands by."""
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid)\ntime.sleep(60)"
    with standby([sys.executable, "-u", str(script(tmp_path, text))]) as spares:
        with closing(spares.take()), closing(fork(spares, clean())) as rank:
            os.set_blocking(rank.stdout, True)
            below = int(os.read(rank.stdout, 64))
            assert rank.code is None
            assert spares._team is not None
            spares._team.kill()
            until(lambda: rank.code is not None)
            assert rank.code == -signal.SIGKILL
            until(lambda: not alive(below))
        assert alive(pid_of(spares))


def test_forks_draw_different_numbers(tmp_path: Path) -> None:
    """Generators that nobody seeded are not the same in all ranks, as they are not in processes started one by one."""
    argv = [
        sys.executable,
        "-u",
        str(script(tmp_path, "import random, numpy\nprint(random.random(), numpy.random.rand())")),
    ]
    words = [sys.executable, "-c", "import torch; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as like:
        assert like.stdout is not None
        like.stdout.readline()
        with standby(argv, like.pid) as spares, closing(spares.take()):
            like.kill()
            drawn = []
            for _ in range(2):
                with closing(fork(spares, clean())) as child:
                    drawn += everything(child.stdout).split()
    assert len(set(drawn)) == 4


@pytest.mark.parametrize(
    "argv", [["/bin/sh", "-c", "exit"], [sys.executable, "-u", "folder"], [sys.executable, "-u"]]
)
def test_other_programs_have_none(argv: list[str]) -> None:
    """Only Python scripts and modules can be stood by for."""
    with standby(argv) as spares:
        assert spares._standby is None


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", False),
        ("os.environ.setdefault('MKL_NUM_THREADS', '1')", False),
        ("from os import environ\nenviron |= {'A': '1'}", False),
        ("os.putenv('A', '1')", False),
        ("if os.environ['RANK'] == '0': print(os.environ.get('A'))", True),
    ],
)
def test_a_program_that_sets_variables_has_none(tmp_path: Path, text: str, waits: bool) -> None:
    """Many a variable counts only before torch is imported: such a program starts afresh, as its first attempt did."""
    with standby([sys.executable, "-u", str(script(tmp_path, text))]) as spares:
        assert (spares._standby is not None) == waits


def standing_by(supervisor: int) -> list[int]:
    """The interpreter that stands by under a supervisor."""
    children = psutil.Process(supervisor).children()
    return [child.pid for child in children if any("launch.standby" in word for word in child.cmdline())]


def test_a_restart_uses_it_and_the_logs_are_those_of_any_rank(tmp_path: Path) -> None:
    """After a SIGKILL the next attempt's ranks are forks of what stood by, with their own number, output and logs."""
    text = COMMITS + "print('pid', os.getpid(), os.getppid(), flush=True)\ntime.sleep(0 if attempt else 60)"
    logs = tmp_path / "logs"
    process = start("-n", "2", "--max-restarts", "2", "--log-dir", logs, script(tmp_path, text))
    until(lambda: len(standing_by(process.pid)) == 1)
    (spare,) = standing_by(process.pid)
    until(lambda: "pid" in (logs / "attempts/0/rank-0001.log").read_text(encoding="utf-8"))
    os.kill(int((logs / "attempts/0/rank-0001.log").read_text(encoding="utf-8").split()[1]), signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 0
    for rank in range(2):
        log = (logs / f"attempts/1/rank-{rank:04d}.log").read_text(encoding="utf-8")
        assert log.split()[2] == str(spare)
        assert f"[rank {rank}] {log}" in ended.out


def test_it_imports_while_the_first_attempt_does(tmp_path: Path) -> None:
    """Who loads torch will need it again: nothing has to be committed, nor any time to pass, before one stands by."""
    process = start("--max-restarts", "1", script(tmp_path, "import torch\ntime.sleep(60)"))
    began = time.monotonic()
    until(lambda: bool(standing_by(process.pid)), supervisor._WARM_AFTER_S)
    assert time.monotonic() - began < supervisor._WARM_AFTER_S
    process.kill()


def test_who_was_killed_is_named_though_others_go_on(tmp_path: Path) -> None:
    """The other rank, which does not hear SIGTERM, is killed in turn, and is not the one that is named."""
    text = """
    if attempt: sys.exit()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1 if os.environ["RANK"] == "1" else 60)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = run("-n", "2", "--max-restarts", "1", script(tmp_path, COMMITS + textwrap.dedent(text)))
    assert ended.code == 0
    assert "rank 1 of 2" in ended.err
    assert "killed by SIGKILL" in ended.err


def test_nothing_stands_by_when_the_supervisor_is_gone(tmp_path: Path) -> None:
    """SIGKILL of the command ends what stands by, as it ends the ranks."""
    process = start("--max-restarts", "1", script(tmp_path, COMMITS + "time.sleep(60)"))
    until(lambda: len(standing_by(process.pid)) == 1)
    (spare,) = standing_by(process.pid)
    process.kill()
    until(lambda: not alive(spare))


@pytest.mark.parametrize("options", [["--max-restarts", "1", "--no-spare"], ["--max-restarts", "0"]])
def test_nothing_stands_by_where_it_is_not_wanted(tmp_path: Path, options: list[str]) -> None:
    """--no-spare, or no restart to come: no process beside the ranks and their guard."""
    text = COMMITS + "import psutil\ntime.sleep(2.5)\nprint(len(psutil.Process(os.getppid()).children()))"
    assert run(*options, script(tmp_path, text)).out == "2\n"


def test_torch_is_there_before_the_program_asks(tmp_path: Path) -> None:
    """What the first attempt had loaded is loaded; no CUDA, no thread of Python's runs; DataLoader workers start."""
    text = """
    print("torch" in sys.modules, "torch._dynamo" in sys.modules, "worldsize.train.run" in sys.modules)
    import threading, torch
    from torch.utils.data import DataLoader
    print(torch.cuda.is_initialized(), threading.active_count())
    print([int(x) for x in DataLoader(range(3), num_workers=1)])
    """
    argv = [sys.executable, "-u", str(script(tmp_path, text))]
    words = [sys.executable, "-c", "import torch; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as like:
        assert like.stdout is not None
        like.stdout.readline()
        code, out, err = warm(argv, clean(), like.pid, commits=True)
        like.kill()
    assert (code, out, err) == (0, "True True True\nFalse 1\n[0, 1, 2]\n", "")
