"""Room: where a process stands that may not be able to say it: its state, and its stacks. No torch.

A process that calls `install` lets itself be asked: a signal makes C code write the Python stacks of all its threads into
a file in memory, also while native code holds the interpreter. What it forks, data workers above all, can be asked too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7
"""Nobody else's; who does not expect it would be ended by it, so it is only sent to those that catch it."""

_HERE = Path(__file__).parents[1]
_NOT_USERS = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(_HERE), "<")
_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_SPIED = re.compile(r"^ +(?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_CATCHES = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
_PAUSE_S, _SPY_S = 0.02, 10.0
_TICKS = os.sysconf("SC_CLK_TCK")
_installed: list[int] = []


@dataclass(frozen=True, slots=True)
class Facts:
    """What the kernel says of a process or thread.

    Attributes:
        state: one letter, as in `ps`: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
        cpu: seconds of processor time so far.
        began: when it started, in clock ticks since boot: with the id it names one process for ever.
        where: in which function of the kernel it sleeps, where that may be read.
    """

    state: str
    cpu: float
    began: int
    where: str


@dataclass(frozen=True, slots=True)
class Address:
    """How a process is reached by others of its host.

    Attributes:
        host: the host's name, and the space of its process ids: containers may have their own.
        pid: its id; began: see `Facts`.
        file: the descriptor of its stacks.
    """

    host: tuple[str, str]
    pid: int
    began: int
    file: int


def install() -> int:
    """Let this process, and what it forks from now on, be asked for stacks. Returns the descriptor they are written to."""
    if not _installed:
        file = os.memfd_create("worldsize-stacks")
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        _installed.append(file)
    return _installed[0]


def here() -> Address:
    """This process's address; it can be asked from now on."""
    pid = os.getpid()
    began = facts(pid)
    return Address(place(), pid, began.began if began else 0, install())


def place() -> tuple[str, str]:
    """The host of this process; ids of processes mean the same in equal places."""
    return socket.gethostname(), str(Path("/proc/self/ns/pid").readlink())


def facts(pid: int, thread: int | None = None) -> Facts | None:
    """What the kernel says of a process, or of one thread of it; None where it is gone."""
    folder = Path(f"/proc/{pid}/task/{thread}" if thread else f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        where = (folder / "wchan").read_text().strip("0\n")
    except OSError:
        return None
    return Facts(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]), where)


def ask(pid: int, file: int, patience: float = 1.0) -> str:
    """The stacks of a process of this host that installed, or of one that it forked; empty where it cannot be asked.

    Args:
        pid: which process.
        file: the descriptor that `install` returned in it, or in the process that forked it.
        patience: seconds to wait for an answer.
    """
    try:
        caught = _CATCHES.search(Path(f"/proc/{pid}/status").read_text())
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
            return ""
        with Path(f"/proc/{pid}/fd/{file}").open("rb") as stacks:
            before = stacks.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            end, text, last = time.monotonic() + patience, b"", b"?"
            while time.monotonic() < end and (not text or text != last):
                time.sleep(_PAUSE_S)
                stacks.seek(before)
                last, text = text, stacks.read()
    except OSError:
        return ""
    return text.decode(errors="replace")


def taken(pid: int, file: int, state: str) -> str:
    """The best picture of a process of this host: its own, else py-spy's, else what the kernel says."""
    own = "" if state in "TtZ" else ask(pid, file)
    found = own or spied(pid)
    if found:
        return found
    known = facts(pid)
    sleeps = f", in {known.where}" if known and known.where else ""
    return (
        f"process {pid}: state {known.state if known else 'gone'}{sleeps}; it gave no stack, and py-spy is not here\n"
    )


def spied(pid: int) -> str:
    """What py-spy sees of a process, where it is installed and allowed; else nothing."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return ""
    file = os.memfd_create("worldsize-spy")
    try:
        child = os.posix_spawn(
            program, [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)], {},
            file_actions=[(os.POSIX_SPAWN_DUP2, file, 1), (os.POSIX_SPAWN_DUP2, file, 2)],
        )  # fmt: skip
        if _ended(child) != 0:
            return ""
        os.lseek(file, 0, os.SEEK_SET)
        return os.read(file, 1 << 20).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _ended(child: int) -> int:
    end = time.monotonic() + _SPY_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_PAUSE_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def line_of(stacks: str) -> str:
    """The innermost line of the user's own program in stacks as `taken` gives them: "train.py:31 in load"; empty without.

    The thread that answered is looked at: the main thread, unless it cannot.
    """
    blocks = re.split(r"^(?=Current thread|Thread )", stacks, flags=re.MULTILINE)
    current = [block for block in blocks if block.startswith("Current thread") or "MainThread" in block] or blocks[
        -1:
    ]
    frames = [found for line in "".join(current).splitlines() if (found := _FRAME.match(line) or _SPIED.match(line))]
    own = [frame for frame in frames if not frame["file"].startswith(_NOT_USERS)] or frames
    return f"{Path(own[0]['file']).name}:{own[0]['line']} in {own[0]['name']}" if own else ""


def is_users(file: str) -> bool:
    """Whether a file of code is the user's own: of no package, and not ours."""
    return not file.startswith(_NOT_USERS)
