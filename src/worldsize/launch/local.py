"""Room: a plan from start to exit code on this node: attempts, restarts, the log folder, the last word on the console."""

from __future__ import annotations

import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.launch.logs import ERR, Terminal
from worldsize.launch.loop import Loop
from worldsize.launch.meeting import ATTEMPTS, Alone
from worldsize.launch.supervisor import STOPS, Attempt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.logs import Sink
    from worldsize.launch.meeting import Meeting
    from worldsize.launch.plan import Plan
    from worldsize.launch.verdict import Verdict


def run(plan: Plan, sink: Sink | None = None) -> int:
    """Start the ranks of this node, serve them to the end, and return the exit code of the whole job.

    The code is that of the first failing rank (128 + n after signal n), 75 where the ranks stopped on request, and 0
    where all of them succeeded. What failed is said in one line on standard error.

    Raises:
        LaunchError: the program cannot be started, a port is taken, or the nodes do not meet.
    """
    return supervise(plan, sink).code


def supervise(plan: Plan, sink: Sink | None = None) -> Verdict:
    """Like `run`, but returns the whole verdict."""
    loop = Loop()
    console = sink or Terminal(loop)
    try:
        with _log_dir(plan) as log_dir:
            meeting = _meeting(loop, plan, log_dir)
            try:
                verdict = _attempts(loop, console, plan, log_dir, meeting)
            finally:
                meeting.close()
        if verdict.code == 0 and plan.log_dir is None:
            shutil.rmtree(log_dir, ignore_errors=True)
        return verdict
    finally:
        console.flush()
        loop.close()
