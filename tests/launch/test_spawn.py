"""A function on several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import clean, script
from worldsize.errors import ConfigError, LaunchError
from worldsize.launch.spawn import spawn

if TYPE_CHECKING:
    from pathlib import Path


def test_results_come_back_by_rank() -> None:
    """Every rank's value, in order, whatever they are; the arguments reach every rank."""
    found = spawn(lambda x: (int(os.environ["RANK"]), os.environ["WORLD_SIZE"], {x}), 3, (5,))
    assert found == [(0, "3", {5}), (1, "3", {5}), (2, "3", {5})]


def test_the_exception_of_the_first_failing_rank_is_raised_here() -> None:
    """Its own type, with the traceback of its rank as a note."""

    def fails() -> None:
        import time

        if os.environ["RANK"] == "1":
            raise KeyError("bad key x")
        time.sleep(600)

    with pytest.raises(KeyError, match="bad key x") as caught:
        spawn(fails, 2)
    (note,) = caught.value.__notes__
    assert f"On rank 1 of 2 on {socket.gethostname()} (test_spawn.py:" in note
    assert ", in fails" in note


def test_an_exception_is_said_once(tmp_path: Path) -> None:
    """By the program that spawned, with rank, host, file and line; the rank itself prints nothing, nor do its peers."""
    path = script(
        tmp_path,
        """
        from worldsize.launch.spawn import spawn
        def f():
            bad = "a" + "bc"
            raise KeyError(bad)
        spawn(f, 2)
        """,
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'abc'") == 1
    where = ("spawn(f, 2)", "raise KeyError(bad)")
    assert done.stderr.count("Traceback (most recent call last)") == len(where)
    assert all(done.stderr.count(line) == 1 for line in where)
    assert f"of 2 on {socket.gethostname()} (train.py:6 in f):" in done.stderr
    assert done.stdout == ""


def test_an_exception_that_cannot_travel_is_told() -> None:
    """A class that does not unpickle becomes a LaunchError with its words."""

    def fails() -> None:
        class OddError(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"odd {one} {two}")

        raise OddError(1, 2)

    with pytest.raises(LaunchError, match="OddError: odd 1 2"):
        spawn(fails, 1)


def test_a_killed_rank_is_an_error() -> None:
    """No exception came back: the signal is named."""
    with pytest.raises(LaunchError, match=rf"killed by SIGKILL.*\(rank 0 of 1 on {socket.gethostname()}\)"):
        spawn(lambda: os.kill(os.getpid(), 9), 1)


def test_a_stop_on_request_is_a_system_exit() -> None:
    """Code 75 of the ranks is code 75 of the program that spawned them."""
    with pytest.raises(SystemExit) as caught:
        spawn(sys.exit, 2, (75,))
    assert caught.value.code == 75


def test_what_ranks_print_is_printed_here(capfd: pytest.CaptureFixture[str]) -> None:
    """Notebooks show it: each line with its rank."""
    spawn(print, 2, ("hello",))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


def test_it_works_outside_the_main_thread() -> None:
    """Signals cannot be caught there, and need not be."""
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(spawn(os.getpid, 2)))
    thread.start()
    thread.join()
    assert len(set(found[0])) == 2


def test_scripts_need_no_guard(tmp_path: Path) -> None:
    """A script's own function, at module level, without `if __name__ == "__main__"` (the tutorial's mp.spawn form)."""
    path = script(
        tmp_path,
        "import beside\ndef f(): return beside.x\nfrom worldsize.launch.spawn import spawn\nprint(spawn(f, 2))",
    )
    (tmp_path / "beside.py").write_text("x = 3", encoding="utf-8")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, cwd="/", env=clean())
    assert done.stdout == "[3, 3]\n"


def test_no_ranks_are_refused() -> None:
    """Zero processes is a mistake."""
    with pytest.raises(ConfigError, match="no ranks"):
        spawn(print, 0)
