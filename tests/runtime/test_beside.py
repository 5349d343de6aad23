"""The process beside one that may be stuck: whom it ends, and that it is gone with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import until

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = """
import contextlib, os, re, signal, sys, time
from worldsize.runtime import stacks
from worldsize.runtime.beside import Beside

def holding():
    re.match(r"(a+)+$", "a" * 60 + "b")

beside = Beside(0.05, 3, stacks.install(), sys.argv[1])
beside.heard(20, "rank 3 has made no progress since step 5")
print(beside._pid, flush=True)
"""
LINE = (
    "rank 3 has made no progress since step 5: native code holds the interpreter, in train.py:7 in holding; stacks: "
)


class Program:
    """A program with a process beside it."""

    def __init__(self, folder: Path, body: str) -> None:
        file = folder / "train.py"
        file.write_text(BEGIN + body, encoding="utf-8")
        self.stacks, self.error = folder / "stall", folder / "error.json"
        self.process = subprocess.Popen(
            [sys.executable, file, self.stacks], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(self.error)}, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.beside = int(self.process.stdout.readline())

    def is_gone(self) -> bool:
        """Whether there is no such process as the one beside it."""
        return not Path(f"/proc/{self.beside}").exists()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """Nothing that a test started outlives it."""
    made: list[Program] = []
    yield made
    for each in made:
        with suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.communicate()


def test_who_holds_its_interpreter_is_ended_with_the_line(tmp_path: Path, programs: list[Program]) -> None:
    """On standard error and in its launcher's file; its stacks are left."""
    programs.append(program := Program(tmp_path, "holding()"))
    assert program.process.wait(20) == -signal.SIGKILL
    assert program.process.stderr is not None
    assert program.process.stderr.read() == f"worldsize: {LINE}{program.stacks}.\n"
    assert LINE in json.loads(program.error.read_text(encoding="utf-8"))["message"]["message"]
    assert "in holding" in (program.stacks / "rank-0003.txt").read_text(encoding="utf-8")
    until(program.is_gone)


def test_who_is_heard_in_time_is_not(tmp_path: Path, programs: list[Program]) -> None:
    """However long it runs, and however long it does something else afterwards."""
    heard = "with contextlib.closing(beside):\n    for _ in range(20):\n        time.sleep(0.1)\n        beside.heard(20, '')\n"
    programs.append(program := Program(tmp_path, f"{heard}time.sleep(2)"))
    assert program.process.wait(20) == 0
    until(program.is_gone)


def test_long_last_words_are_no_stall(tmp_path: Path, programs: list[Program]) -> None:
    """Of a program that has ended, and closed nothing."""
    slow = "class Slow:\n    def __del__(self, sleep=time.sleep):\n        sleep(3)\nslow = Slow()"
    programs.append(program := Program(tmp_path, slow))
    assert program.process.wait(20) == 0


def test_it_is_gone_with_the_process(tmp_path: Path, programs: list[Program]) -> None:
    """Though a fork of that, as a data worker, lives on with all that it had open, and signals to the group are not for it."""
    fork = "if not os.fork():\n    beside.close()\n    time.sleep(30)\ntime.sleep(30)"
    programs.append(program := Program(tmp_path, fork))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(program.beside, number)
    time.sleep(0.3)
    assert not program.is_gone()
    program.process.kill()
    until(program.is_gone)


@pytest.mark.parametrize("how", ["os.kill(beside._pid, 9)", "os.kill(beside._pid, 9)\nos.waitpid(beside._pid, 0)"])
def test_a_program_goes_on_without_it(tmp_path: Path, programs: list[Program], how: str) -> None:
    """Whoever ended it; also one that ends itself over a broken pipe."""
    body = (
        f"signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n{how}\ntime.sleep(0.2)\nbeside.heard(1, '')\nbeside.close()"
    )
    programs.append(program := Program(tmp_path, body))
    assert program.process.wait(20) == 0


def test_where_it_cannot_be_started_nobody_is_ended(tmp_path: Path) -> None:
    """And nothing fails."""
    begin = BEGIN.replace("beside = ", "sys.executable = '/nowhere'\nbeside = ")
    words = (sys.executable, "-c", f"{begin}beside.heard(1, '')\nbeside.close()", str(tmp_path))
    assert subprocess.run(words, check=False, capture_output=True, text=True).stdout == "0\n"
