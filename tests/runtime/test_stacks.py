"""Asking a process where it is: also one whose interpreter is held, and what it forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from worldsize.runtime import stacks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLDS = """
    import os, re, sys, time
    from worldsize.runtime import stacks
    child = 0 if sys.argv[1] == "itself" else os.fork()
    file = stacks.install() if child == 0 else 0
    print(os.getpid(), file, flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")
"""
FORKS = """
    import os, sys, time
    from worldsize.runtime import stacks
    file = stacks.install()
    child = os.fork()
    if child:
        print(child, file, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run(tmp_path: Path, started: list[subprocess.Popen[str]], text: str) -> tuple[int, int]:
    """Start a program that says which process to ask, and its descriptor."""
    file = tmp_path / "held.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(file), "itself"], stdout=subprocess.PIPE, text=True, process_group=0
    )
    started.append(process)
    assert process.stdout is not None
    pid, descriptor = process.stdout.readline().split()
    time.sleep(0.3)
    return int(pid), int(descriptor)


def test_a_process_whose_interpreter_is_held_answers(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """Its C code does, with the line of the program."""
    pid, file = run(tmp_path, started, HOLDS)
    assert stacks.line_of(stacks.ask(pid, file)) == "held.py:7 in <module>"
    assert stacks.line_of(stacks.ask(pid, file)) == "held.py:7 in <module>", "it can be asked again"


def test_what_it_forked_answers_too(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """As data workers do."""
    assert stacks.line_of(stacks.ask(*run(tmp_path, started, FORKS))) == "held.py:8 in <module>"


def test_who_does_not_expect_it_is_left_in_peace(started: list[subprocess.Popen[str]]) -> None:
    """The signal would end a process that does not catch it: it is not sent."""
    process = subprocess.Popen(["/bin/sleep", "60"], stdout=subprocess.PIPE, text=True, process_group=0)
    started.append(process)
    assert stacks.ask(process.pid, 3) == ""
    assert process.poll() is None


def test_the_kernel_tells_the_state() -> None:
    """Of a process that is stopped; of one that is gone nothing."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    known = stacks.facts(child)
    assert known is not None
    assert known.state == "T"
    assert "state T" in stacks.taken(child, 3, "T") or "Thread" in stacks.taken(child, 3, "T")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert stacks.facts(child) is None


def test_what_py_spy_shows_is_read_too() -> None:
    """The main thread's innermost line of the user's program."""
    shown = (
        "Process 7: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        'Thread 7 (idle): "MainThread"\n    <module> (/home/me/train.py:31)\n'
        'Thread 8 (idle): "other"\n    f (/home/me/other.py:2)\n'
    )
    assert stacks.line_of(shown) == "train.py:31 in <module>"
