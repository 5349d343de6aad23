"""Room: processes: argv, pipes, exit codes, groups that end together. The one module that says `subprocess`.

A `Group` is one process group led by a guard: a shell that waits for the end of its standard input, which only this
process holds open. However this process ends, SIGKILL included, the kernel closes that pipe and the guard kills the
whole group, children of children too. There is no moment at which a child runs unguarded, and no code between fork
and exec.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import LaunchError, NotStartedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_GUARD = "trap '' HUP INT QUIT TERM USR1 USR2; read -r line; kill -s KILL 0"


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it printed."""

    argv: tuple[str, ...]
    code: int
    """The exit code, -n after signal n."""
    out: str
    err: str


def call(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    text: str = "",
    timeout: float | None = None,
    cwd: Path | None = None,
) -> Done:
    """Run a command to its end with exactly `env`; `text` is what it reads.

    Raises:
        NotStartedError: the program is not there or cannot be executed.
        LaunchError: it had not ended after `timeout` seconds, and was killed.
    """
    try:
        done = subprocess.run(  # noqa: S603 - commands are put together by their own rooms
            list(argv),
            input=text.encode(),
            capture_output=True,
            env=dict(env),
            timeout=timeout,
            cwd=cwd,
            check=False,
        )
    except (OSError, ValueError) as error:
        raise NotStartedError(f"{argv[0]} cannot be started", found=str(error)) from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or error.stdout or b"").decode(errors="replace").strip()
        raise LaunchError(f"`{' '.join(argv)}` had not ended after {timeout:g} s", found=said or None) from error
    return Done(
        tuple(argv), done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )


def attend(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command in this process's place: its streams and open descriptors, its exit code (128 + n after signal n).

    Signals are left to the command: for processes whose whole group is signalled, as a task of Slurm is.

    Raises:
        NotStartedError: the program is not there or cannot be executed.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        # Not ignored: the command would inherit that, as it is to where it is so already.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    try:
        process = subprocess.Popen(list(argv), env=dict(env), close_fds=False)  # noqa: S603 - as `call`
    except (OSError, ValueError) as error:
        raise NotStartedError(f"{argv[0]} cannot be started", found=str(error)) from error
    code = process.wait()
    return 128 - code if code < 0 else code


@dataclass(slots=True)
class Child:
    """One process that was started. The descriptors are its owner's to watch; `close` gives them back."""

    pid: int
    ended: int
    """A descriptor that becomes readable when the process has ended."""
    stdout: int
    stderr: int
    _process: subprocess.Popen[bytes]

    @property
    def code(self) -> int | None:
        """The exit code, -n after signal n, None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process itself. Nothing happens where it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def write(self, data: bytes) -> None:
        """Write into its standard input, where that is a pipe. Nothing happens where it reads no more."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.ended)
        if self._process.stdin is not None:
            self._process.stdin.close()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


class Group:
    """Processes that end together, at the latest with this process."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(  # noqa: S603 - a constant
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            process_group=0,
        )
        self._children: list[Child] = []

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: bool = False,
        feed: bool = False,
        keep: Sequence[int] = (),
    ) -> Child:
        """Start `argv` with exactly `env`; with `stdin` it reads what this process would have read.

        With `feed` it reads what `Child.write` writes, and the end when this process ends. The descriptors `keep` stay
        open in it.

        Raises:
            NotStartedError: the program is not there or cannot be executed.
        """
        try:
            process = subprocess.Popen(  # noqa: S603 - starting the user's program is what this module is for
                list(argv),
                stdin=subprocess.PIPE if feed else None if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(env),
                pass_fds=tuple(keep),
                process_group=self._guard.pid,
            )
        except (OSError, ValueError) as error:
            raise NotStartedError(
                f"{argv[0]} cannot be started",
                found=str(error),
                do="see whether it is made for this machine, and whether the interpreter in its first line exists",
            ) from error
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.fileno(), process.stderr.fileno()
        for descriptor in (out, err):
            os.set_blocking(descriptor, False)
        child = Child(process.pid, os.pidfd_open(process.pid), out, err, process)
        self._children.append(child)
        return child

    def kill(self) -> None:
        """SIGKILL every process of the group, children of children included. Returns without waiting for them."""
        # The guard is not reaped before `close`, so its number cannot belong to another group by now.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)

    def close(self) -> None:
        """End whatever still runs, and reap what was started. Pipes stay readable until the child's `close`."""
        self.kill()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        for process in (self._guard, *(child._process for child in self._children)):  # noqa: SLF001 - one room
            process.wait()
