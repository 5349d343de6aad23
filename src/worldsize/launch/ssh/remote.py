"""Room: the commands that reach a host: OpenSSH's and pdsh's, what the shell there executes, why one failed. Pure.

Nothing of the training stands on a command line but the interpreter, the folder and PYTHONPATH: the rest, which may be
secret, follows over standard input. pdsh gives its commands no input (and closes it when it ends): there, a named pipe of
the host takes the place.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import NotStartedError
from worldsize.launch.ssh import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

SHELLS = ("ssh", "pdsh")
PASSED = ("WORLDSIZE_", "NCCL_", "UCX_")
"""Beginnings of the names of variables that go over by themselves."""
LOST = 255
"""The exit code of ssh for a connection that failed."""

_SSH = (
    "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20",
    "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6",
)  # fmt: skip
_NO_FOLDER = 'cd "$1" 2>/dev/null || { printf "\\n%s no-folder\\n" "$2"; exit 2; }'


@dataclass(frozen=True, slots=True)
class Way:
    """How hosts are reached.

    Attributes:
        tool: ssh or pdsh.
        options: further options of ssh.
        python: the interpreter there.
        folder: the working folder there.
        path: PYTHONPATH there.
    """

    tool: str
    python: str
    folder: str
    options: tuple[str, ...] = ()
    path: str | None = None

    @property
    def feeds(self) -> bool:
        """Whether a command there reads what is written here."""
        return self.tool == "ssh"

    def start(self, host: str, mark: str) -> tuple[str, ...]:
        """The argv that starts our process on a host."""
        env = ("env", f"PYTHONPATH={self.path}") if self.path else ("env",)
        inner = (*env, self.python, "-m", "worldsize", "host", "--mark", mark, *(() if self.feeds else ("--pipe",)))
        script = f"{_NO_FOLDER}\nexec {shlex.join(inner)}"
        return self._reach(
            host, shlex.join(("exec", "/bin/sh", "-c", script, "sh", self.folder, f"{wire.MARK} {mark}"))
        )

    def write(self, host: str, pipe: str, line: bytes) -> tuple[str, ...]:
        """The argv that writes a line into a named pipe of a host."""
        script = 'printf "%s\\n" "$1" >"$2"'
        return self._reach(host, shlex.join(("exec", "/bin/sh", "-c", script, "sh", line.decode().strip(), pipe)))

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of these commands."""
        if self.tool == "ssh":
            return dict(base)
        own = (base.get("PDSH_SSH_ARGS_APPEND", ""), shlex.join((*self.options, *_SSH)))
        return {**base, "PDSH_RCMD_TYPE": base.get("PDSH_RCMD_TYPE", "ssh"), "PDSH_SSH_ARGS_APPEND": " ".join(own)}

    def _reach(self, host: str, command: str) -> tuple[str, ...]:
        if self.tool == "pdsh":
            return ("pdsh", "-N", "-S", "-w", host, command)
        # Of an option that comes twice ssh takes the first: the user's.
        return ("ssh", *self.options, *_SSH, "--", host, command)


_REASONS = (
    ("IDENTIFICATION HAS CHANGED", "its host key is another one than before", "see why; then ssh-keygen -R {host}"),
    ("Host key verification failed", "its host key is not known here", "accept it once: ssh {host}"),
    ("Permission denied", "it does not let us in without a password", "set up a key: ssh-copy-id {host}; or give --ssh-args"),
    ("Could not resolve", "its name is not known", "write it as ssh knows it, or give it a HostName in ~/.ssh/config"),
    ("No module named worldsize", "worldsize is not installed for {python} there", "install it, or set PYTHONPATH"),
)  # fmt: skip


def failed(way: Way, host: str, code: int, said: str) -> NotStartedError:
    """Why our process on a host did not come up, from the exit code and what was printed."""
    lines = [line.strip() for line in re.sub(r"(?m)^pdsh@.*$", "", said).splitlines() if line.strip()]
    for sign, what, do in _REASONS:
        if found := next((line for line in lines if sign in line), None):
            place = {"host": host, "python": way.python}
            return NotStartedError(f"host {host}: {what.format(**place)}", found=found, do=do.format(**place))
    last = lines[-1] if lines else f"exit code {code}"
    if code in (126, 127):
        return NotStartedError(f"host {host}: no interpreter {way.python}", found=last, do="give --python PATH")
    what = "cannot be reached" if code == LOST else f"our process there ended with {code} before it was ready"
    return NotStartedError(
        f"host {host}: {what}", found=last, do=f"see whether this works: {way.tool} ... {host} true"
    )
