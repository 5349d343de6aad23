"""Room: from SIGKILL of a rank to the first step of the next attempt, small model on CPUs: ours beside torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, RESTARTS, TARGET = "2", "3", 0.5
KILL_AT, VICTIM = 25, 1
"""The step after which rank VICTIM is killed: in the middle between two checkpoints."""


def recovery(command: Callable[[str], list[str]]) -> float:
    """Seconds from the kill to the first line of a step in the next attempt.

    Raises:
        RuntimeError: there was no next attempt, or it did not end well.
    """
    killed = took = None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        words = command(folder)
        process = subprocess.Popen(words, env=measure.environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            for line in process.stdout or ():
                _, told, values = line.partition("STEP ")
                if not told:
                    continue
                attempt, rank, pid, step = map(int, values.split())
                if killed is None and rank == VICTIM and step >= KILL_AT:
                    os.kill(pid, signal.SIGKILL)
                    killed = time.monotonic()
                elif took is None and killed is not None and attempt > 0:
                    took = time.monotonic() - killed
        if took is None or process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}\n{errors.read()[-6000:]}")
    return took


def main() -> None:
    """Measure pairs and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    count = parser.parse_args().pairs
    options = ("--nproc-per-node", RANKS, "--max-restarts", RESTARTS)
    programs = measure.PROGRAMS
    ours = partial(
        recovery, lambda folder: measure.worldsize_run(*options, str(programs / "restart_ours.py"), folder)
    )
    peer = partial(
        recovery,
        lambda folder: measure.torchrun("--standalone", *options, str(programs / "restart_torchrun.py"), folder),
    )
    found = measure.pairs(ours, peer, count)
    measure.report([measure.compare("SIGKILL to next step", *found, unit="s", against="torchrun", target=TARGET)])


if __name__ == "__main__":
    main()
