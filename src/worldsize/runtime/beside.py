"""Room: a small process beside this one, which ends it when nothing was heard from it for too long. No torch.

Where native code holds the interpreter no thread of it can act, and a timer of C code or of the kernel ends a process too that
was only stopped (Ctrl-Z, `scontrol suspend`, a paused container): its time goes on meanwhile, and it is over before any thread
runs again. So somebody outside counts looks: none at a process that is stopped, and whoever is stopped together with it takes
none. The file is a program too, which imports next to nothing until the end: it costs about 20 ms and 9 MB.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
from contextlib import suppress

_LONGEST = 1 << 12


class Beside:
    """That process, for the one that it looks at. Where it cannot be started, nobody ends this one.

    Args:
        every: seconds between two looks.
        rank: whose error file is written.
        file: what `stacks.install` returned.
        folder: where the stacks of the end are left.
    """

    def __init__(self, every: float, rank: int, file: int, folder: str) -> None:
        import socket

        from worldsize.runtime import env

        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A program may have SIGPIPE end it; and who looks may be stopped itself, and take nothing.
        self._flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        self._owner, self._pid = os.getpid(), 0
        words = (__file__, str(self._owner), str(every), str(rank), str(file), folder)
        streams = [(os.POSIX_SPAWN_DUP2, other.fileno(), 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        with other, suppress(OSError):
            # What is sent to the whole group is not meant for it: it ends with this process.
            self._pid = os.posix_spawn(
                sys.executable, [sys.executable, "-I", "-S", *words], env.read(), file_actions=streams,
                setsigmask=signal.valid_signals(),
            )  # fmt: skip
        # Long last words of a program that has ended, as those of a tracker, are no stall.
        atexit.register(self.close)

    def heard(self, looks: int, line: str) -> None:
        """This process is well. Nothing more for so many looks, and it is ended with `line` and what holds it."""
        with suppress(OSError):
            self._line.send(f"{looks} {line}".encode(), self._flags)

    def close(self) -> None:
        """Be looked at no more. Safe to call twice; a fork of this process changes nothing by it."""
        atexit.unregister(self.close)
        self._line.close()
        if self._pid and os.getpid() == self._owner:
            with suppress(ChildProcessError):
                if os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
        self._pid = 0


def main(pid: int, every: float, rank: int, file: int, folder: str) -> None:
    """Look at `pid`, the process that started this one, until it ends or is ended."""
    # What it had open must not stay open when it is gone: sockets, devices.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    left, line = 0, ""
    while os.getppid() == pid:
        if select.select([0], [], [], every)[0]:
            heard = os.read(0, _LONGEST)
            if not heard:
                return
            looks, _, line = heard.decode().partition(" ")
            left = int(looks)
        elif _state(pid) not in "Tt":
            left -= 1
            if not left:
                _end(pid, rank, file, folder, line)


def _state(pid: int) -> str:
    """One letter, as in `ps`."""
    try:
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return "Z"
    try:
        return os.read(stat, _LONGEST).rpartition(b") ")[2][:1].decode()
    finally:
        os.close(stat)


def _end(pid: int, rank: int, file: int, folder: str, line: str) -> None:
    """Say where it is, to whom it would have said it, and end it."""
    try:
        import site
        from pathlib import Path

        site.main()  # an environment's packages are no users' programs
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from worldsize.errors import StallError
        from worldsize.runtime import env, failure, stacks

        text = stacks.taken(pid, file, _state(pid))
        inside = f", in {place}" if (place := stacks.line_of(text)) else ""
        with suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"rank-{rank:04d}.txt").write_text(f"{line}\n{text}", encoding="utf-8")
        error = StallError(f"{line}: native code holds the interpreter{inside}; stacks: {folder}")
        failure.say_for(error, rank, env.read().get("TORCHELASTIC_ERROR_FILE"))
    finally:
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
