"""Room: how a job ended, as a class that decides whether it may be tried again. Pure, no torch."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_STOPPED
from worldsize.launch import failure

if TYPE_CHECKING:
    from worldsize.launch.slurm.states import ExitRecord, State


class Ending(StrEnum):
    """Why a job is over."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    """On request, with everything committed (exit code 75)."""
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NODE_FAILURE = "node failure"
    HOST_MEMORY = "out of memory (host)"
    GPU_MEMORY = "out of memory (GPU)"
    RENDEZVOUS = "rendezvous"
    HANG = "hang"
    CANCELLED = "cancelled"
    USER_ERROR = "user error"
    UNKNOWN = "unknown"

    @property
    def retry(self) -> bool:
        """Whether another attempt may end differently. Whoever retries also looks for progress since the last one."""
        return self in _RETRIED


_RETRIED = {
    Ending.STOPPED, Ending.PREEMPTED, Ending.TIME_LIMIT, Ending.NODE_FAILURE, Ending.HOST_MEMORY, Ending.RENDEZVOUS,
    Ending.HANG, Ending.UNKNOWN,
}  # fmt: skip
"""Not GPU memory: the same batch needs the same memory again. Host memory is often used up slowly."""

_BY_STATE = {
    "PREEMPTED": Ending.PREEMPTED,
    "TIMEOUT": Ending.TIME_LIMIT,
    "DEADLINE": Ending.TIME_LIMIT,
    "NODE_FAIL": Ending.NODE_FAILURE,
    "BOOT_FAIL": Ending.NODE_FAILURE,
    "OUT_OF_MEMORY": Ending.HOST_MEMORY,
}

_GPU_MEMORY = re.compile(r"CUDA out of memory|HIP out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_HOST_MEMORY = re.compile(
    r"oom[-_ ]?kill|Out of memory: Killed|DataLoader worker .* killed by signal: Killed|MemoryError\b"
    r"|Cannot allocate memory|Exceeded job memory limit",
    re.IGNORECASE,
)
_HARDWARE = re.compile(
    r"uncorrectable (?:NVLink|ECC)|ECC error|NVRM: Xid|fallen off the bus|GPU is lost|DUE TO NODE FAILURE"
    r"|CUDA-capable device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)
_RENDEZVOUS = re.compile(
    r"Rendezvous\w*Error|rendezvous\b.*(?:timed? ?out|failed)|did not say within|Address already in use|EADDRINUSE"
    r"|waiting for clients|DistStoreError|server socket has failed to listen|could not be reached",
    re.IGNORECASE,
)
_HANG = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)|wait timeout after \d+ms"
    r"|heartbeat monitor.*(?:hang|stuck)|no (?:step|progress) for|hangs? since",
    re.IGNORECASE,
)
_PREEMPTED = re.compile(r"CANCELLED AT .* DUE TO PREEMPTION")
_TIME_LIMIT = re.compile(r"CANCELLED AT .* DUE TO TIME LIMIT")


def classify(state: State, record: ExitRecord | None = None, tail: str = "") -> Ending:
    """How the job ended: UNKNOWN where nothing says so, and for a job that has not.

    The record goes before Slurm's state where they contradict, since launchers flatten exit codes: a training that says
    it has finished has. Only somebody who cancelled is believed more: nobody wants that job back.

    Args:
        state: what Slurm says.
        record: what the job itself wrote; one of another attempt counts for nothing.
        tail: the end of its log, of this attempt alone: requeued jobs append to one file.
    """
    own = record if record is not None and record.of(state.facts) else None
    if own is not None and own.code == 0 and not own.signal:
        return Ending.COMPLETED
    if state.name == "CANCELLED":
        return _cancelled(tail)
    if state.name in _BY_STATE:
        return _BY_STATE[state.name]
    if own is None and state.name not in {"FAILED", "LAUNCH_FAILED"}:
        return Ending.COMPLETED if state.name == "COMPLETED" else Ending.UNKNOWN
    return _failed(state, own, tail)


def _cancelled(tail: str) -> Ending:
    """Some versions call a preempted job cancelled; its log says it."""
    return Ending.PREEMPTED if _PREEMPTED.search(tail) else Ending.CANCELLED


def _failed(state: State, record: ExitRecord | None, tail: str) -> Ending:
    code, signal = _code(state, record)
    if code == EXIT_STOPPED:
        return Ending.STOPPED
    if record is not None and record.line and (found := _from_text(record.line)):
        return found
    if found := _from_text(tail):
        return found
    return Ending.USER_ERROR if code and not signal and code < 128 else Ending.UNKNOWN  # noqa: PLR2004 - 128 + signal


def _code(state: State, record: ExitRecord | None) -> tuple[int, int]:
    if record is not None:
        return record.code, record.signal
    facts = state.facts
    return (facts.exit_code or 0, facts.signal) if facts else (0, 0)


def _from_text(text: str) -> Ending | None:
    for pattern, ending in _FIRST:
        if pattern.search(text):
            return ending
    if any(map(_own_fault, _TRACE.split(text)[1:])):
        return Ending.USER_ERROR
    return next((ending for pattern, ending in _LATER if pattern.search(text)), None)


def _own_fault(trace: str) -> bool:
    """Whether a traceback ends in an exception that is not about peers, nor was handled by raising another."""
    if _HANDLED.search(trace):
        return False
    cause = failure.from_traceback(trace)
    return cause is not None and not failure.follows(cause.what) and not _RENDEZVOUS.search(cause.what)


_TRACE = re.compile(r"Traceback \(most recent call last\):")
_HANDLED = re.compile(r"another exception occurred:\s*$|cause of the following exception:\s*$")

_FIRST = (
    (_GPU_MEMORY, Ending.GPU_MEMORY),
    (_HARDWARE, Ending.NODE_FAILURE),
    (_HOST_MEMORY, Ending.HOST_MEMORY),
    (_PREEMPTED, Ending.PREEMPTED),
    (_TIME_LIMIT, Ending.TIME_LIMIT),
)
"""What names a cause by itself, even among the exceptions that follow from it."""

_LATER = ((_RENDEZVOUS, Ending.RENDEZVOUS), (_HANG, Ending.HANG))
"""What ranks also say when a peer has failed: an exception of the program's own goes before."""
