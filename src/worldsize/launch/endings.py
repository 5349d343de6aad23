"""Room: the ways in which a training ends, and which of them a text speaks of; they decide about another try. No torch."""

from __future__ import annotations

import re
from enum import StrEnum

from worldsize.launch import failure


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

_GPU_MEMORY = re.compile(
    r"out of GPU memory|CUDA out of memory|HIP out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
)
_HOST_MEMORY = re.compile(
    r"oom[-_ ]?kill|out of host memory|Out of memory: Killed|DataLoader worker .* killed by signal: Killed|MemoryError\b"
    r"|Can(?:no|')t allocate memory|Exceeded job memory limit",
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
    r"|heartbeat monitor.*(?:hang|stuck)|no (?:step|progress) (?:for|since)|any progress since|hangs? since",
    re.IGNORECASE,
)
PREEMPTED = re.compile(r"CANCELLED AT .* DUE TO PREEMPTION")
_TIME_LIMIT = re.compile(r"CANCELLED AT .* DUE TO TIME LIMIT")


def from_text(text: str) -> Ending | None:
    """What a log or the line of a failure says; None where it says nothing of the kind."""
    for pattern, ending in _FIRST:
        if pattern.search(text):
            return ending
    if failure.returns(text):
        return Ending.USER_ERROR
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
    (PREEMPTED, Ending.PREEMPTED),
    (_TIME_LIMIT, Ending.TIME_LIMIT),
)
"""What names a cause by itself, even among the exceptions that follow from it."""

_LATER = ((_RENDEZVOUS, Ending.RENDEZVOUS), (_HANG, Ending.HANG))
"""What ranks also say when a peer has failed: an exception of the program's own goes before."""
