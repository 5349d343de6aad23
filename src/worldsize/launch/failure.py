"""Room: what went wrong in a rank, in one line: which rank where, what it was, at which line, what to do.

Sources, best first: the error file of torch's elastic contract, the last Python traceback on the rank's standard
error, the exit code or signal in words. Among several failed ranks the root cause is the earliest one that does not
merely report that a peer is gone.
"""

from __future__ import annotations

import json
import re
import signal
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable

SIGNALLED = 128
"""What a shell adds to the number of the signal that ended a process."""
_LONGEST_TRACE = 1 << 15
_LONGEST_MESSAGE = 600
_RANK = re.compile(r"^\[rank\d+\]:[ ]?", re.MULTILINE)
_FRAME = re.compile(r'^[ |]*File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$', re.MULTILINE)
_EXCEPTION = re.compile(r"^(?:\s*\| )?(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_NAMED = re.compile(r"\w*(?:Error|Exception|Interrupt|Exit|Warning|Group|Timeout|Iteration|Killed)\w*$")
_PACKAGE = Path(__file__).parent.parent
_NOT_USERS = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(_PACKAGE), "<frozen ")

_PEER_GONE = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|remote process exited|recvValue failed"
    r"|DistNetworkError|DistStoreError|NCCL communicator was aborted|Watchdog caught collective operation timeout"
    r"|ncclRemoteError|ncclSystemError|Timed out waiting \d+ms for (?:recv|send)|wait timeout after \d+ms"
    r"|heartbeat monitor|Connection refused|Horovod has been shut down",
    re.IGNORECASE,
)
_STUCK_AGAIN = re.compile(r"progress since step \d+, for the second time")
_STUCK = re.compile(r"^Timeout \(([\d:]+)[\d.]*\)!$", re.MULTILINE)
"""What the timer of Python's faulthandler prints before it ends a process."""
_STUCK_AT = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)
_OURS = re.compile(r"^worldsize: (?:rank \d+ of \d+ on \S+: )?| \([^()]+:\d+ in [^()]+\)$")
"""What a program of ours adds to an error, and the launcher's line says anyway."""

_INTERRUPTED = "KeyboardInterrupt"

_SIGNALS = {
    signal.SIGKILL: ("the kernel's out-of-memory killer or a person", "see dmesg and the memory limit of the job"),
    signal.SIGSEGV: ("a fault in native code", "run with PYTHONFAULTHANDLER=1 to see where"),
    signal.SIGBUS: (
        "memory that went away, often a full /dev/shm",
        "look at df /dev/shm; give the container --shm-size",
    ),
    signal.SIGABRT: ("native code gave up; its message is in the log", None),
    signal.SIGFPE: ("an arithmetic fault in native code", None),
    signal.SIGILL: ("an instruction that this processor lacks", "install builds made for this machine"),
    signal.SIGTERM: ("ended from outside, not by this launcher", None),
    signal.SIGXCPU: ("the limit on processor time", "see ulimit -t"),
}
_CODES = {126: "the program cannot be executed", 127: "a command was not found"}
_HELP = (
    (re.compile(r"OutOfMemoryError|CUDA out of memory"), "use a smaller micro-batch, or shard the model"),
    (
        re.compile(r"ModuleNotFoundError: No module named '(?P<name>[^']+)'"),
        "install {name}, or start from its folder",
    ),
    (re.compile(r"No space left on device"), "free disk space and start again"),
)


@dataclass(frozen=True, slots=True)
class Cause:
    """What an exception said."""

    what: str
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed rank (or node: `rank` is None).

    `age` is how many seconds ago it failed when this was made: hosts need not agree on the time of day.
    """

    host: str
    code: int
    what: str
    rank: int | None = None
    world: int = 1
    where: str | None = None
    do: str | None = None
    log: str | None = None
    trace: str = ""
    """What the rank printed and no console has yet."""
    age: float = 0.0
    after: int = 0
    """0: failed by itself; 1: was ended while it showed an exception; 2: only followed from another failure."""

    @property
    def line(self) -> str:
        """The whole failure, on one line."""
        who = f"rank {self.rank} of {self.world} on {self.host} failed" if self.rank is not None else self.host
        where = f" ({self.where})" if self.where else ""
        hints = [f"Do: {self.do}"] if self.do else []
        hints += [f"log: {self.log}"] if self.log else []
        return f"{who}: {self.what.rstrip('.')}{where}{'. ' if self.do else '; ' if hints else ''}{'; '.join(hints)}"

    @property
    def exit_code(self) -> int:
        """What a shell would say: the code itself, 128 + n after signal n."""
        return SIGNALLED - self.code if self.code < 0 else self.code or EXIT_FAILED

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def root(failures: Iterable[Failure]) -> Failure:
    """The failure that the others followed from. At least one must be given."""
    return min(failures, key=lambda failure: (failure.after, -failure.age))


def from_error_file(path: Path) -> Cause | None:
    """What the process left in TORCHELASTIC_ERROR_FILE; None where it left nothing that can be read."""
    try:
        message = json.loads(path.read_bytes())["message"]
        text = message if isinstance(message, str) else message["message"]
        trace = "" if isinstance(message, str) else str(message.get("extraInfo", {}).get("py_callstack", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Cause(_OURS.sub("", _first_line(str(text))), _where(trace))


def from_traceback(text: str) -> Cause | None:
    """The exception at the end of a Python traceback, wherever its last frame is; None where there is none."""
    text = _RANK.sub("", text)
    frames = list(_FRAME.finditer(text))
    if not frames:
        return None
    for line in text[frames[-1].end() :].splitlines():
        found = _EXCEPTION.match(line)
        if found and (found["message"] is not None or _NAMED.match(found["kind"].rpartition(".")[2])):
            kind = found["kind"].rpartition(".")[2]
            what = f"{kind}: {found['message']}" if found["message"] else kind
            return Cause(_first_line(what), _where(text))
    return None


def from_code(code: int, tail: str) -> tuple[str, str | None]:
    """An exit code in words, with the last line that was printed, and what to do."""
    if code < 0:
        why, do = _SIGNALS.get(signal.Signals(-code), ("", None)) if -code in set(signal.Signals) else ("", None)
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}{f': {why}' if why else ''}", do
    if code == EXIT_FAILED and (stuck := _STUCK.search(tail)):
        return f"no progress for {stuck[1]}: native code holds the interpreter{_stuck_at(tail[stuck.end() :])}", None
    last = next((line for line in reversed(_RANK.sub("", tail).splitlines()) if line.strip()), "")
    words = f" ({_CODES[code]})" if code in _CODES else ""
    return f"exit code {code}{words}{f': {_first_line(last.strip())}' if last else ''}", None


def _stuck_at(stacks: str) -> str:
    """The user's own line in the last stack, which is the main thread's."""
    frames = list(_STUCK_AT.finditer(stacks.rpartition("\nThread ")[2]))
    own = next((frame for frame in frames if not frame["file"].startswith(_NOT_USERS)), None)
    return f", in {PurePath(own['file']).name}:{own['line']}" if own else ""


def advice(what: str) -> str | None:
    """What to do about a known kind of exception, unless it says so itself."""
    if " Do: " in what:
        return None
    for pattern, do in _HELP:
        found = pattern.search(what)
        if found:
            return do.format(**found.groupdict())
    return None


def follows(text: str) -> bool:
    """Whether the text only says that a peer is gone."""
    return _PEER_GONE.search(text) is not None


def returns(text: str) -> bool:
    """Whether the text says that the training got stuck where it had been stuck before."""
    return _STUCK_AGAIN.search(text) is not None


def interrupted(cause: Cause | None) -> bool:
    """Whether the exception is Python's answer to Ctrl-C."""
    return cause is not None and cause.what.startswith(_INTERRUPTED)


def shorten(trace: str) -> str:
    """A traceback of bounded length: the end says more than the beginning."""
    return trace if len(trace) <= _LONGEST_TRACE else f"...\n{trace[-_LONGEST_TRACE:]}"


def _where(trace: str) -> str | None:
    """The last frame in the user's own code, or the last one where there is none: "train.py:31 in load"."""
    frames = list(_FRAME.finditer(_RANK.sub("", trace)))
    if not frames:
        return None
    own = [frame for frame in frames if not frame["file"].startswith(_NOT_USERS)] or frames
    last = own[-1]
    function = last["function"]
    inside = f" in {function}" if function and function != "<module>" else ""
    return f"{PurePath(last['file']).name}:{last['line']}{inside}"


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
