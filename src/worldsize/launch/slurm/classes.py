"""Room: how a job ended, as a class that decides whether it may be tried again. Pure, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import EXIT_STOPPED
from worldsize.launch.endings import PREEMPTED, Ending, from_text
from worldsize.launch.failure import SIGNALLED

if TYPE_CHECKING:
    from worldsize.launch.slurm.states import ExitRecord, State


_BY_STATE = {
    "PREEMPTED": Ending.PREEMPTED,
    "TIMEOUT": Ending.TIME_LIMIT,
    "DEADLINE": Ending.TIME_LIMIT,
    "NODE_FAIL": Ending.NODE_FAILURE,
    "BOOT_FAIL": Ending.NODE_FAILURE,
    "OUT_OF_MEMORY": Ending.HOST_MEMORY,
}


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
    if (own is None or own.code is None) and state.name not in {"FAILED", "LAUNCH_FAILED"}:
        return Ending.COMPLETED if state.name == "COMPLETED" else Ending.UNKNOWN
    return _failed(state, own, tail)


def _cancelled(tail: str) -> Ending:
    """Some versions call a preempted job cancelled; its log says it."""
    return Ending.PREEMPTED if PREEMPTED.search(tail) else Ending.CANCELLED


def _failed(state: State, record: ExitRecord | None, tail: str) -> Ending:
    code, signal = _code(state, record)
    if code == EXIT_STOPPED:
        return Ending.STOPPED
    if record is not None and record.ending is not None:
        return record.ending
    if record is not None and record.line and (found := from_text(record.line)):
        return found
    if found := from_text(tail):
        return found
    return Ending.USER_ERROR if code and not signal and code < SIGNALLED else Ending.UNKNOWN


def _code(state: State, record: ExitRecord | None) -> tuple[int, int]:
    if record is not None and record.code is not None:
        return record.code, record.signal
    facts = state.facts
    return (facts.exit_code or 0, facts.signal) if facts else (0, 0)
