"""Room: from SIGKILL of a rank to the first step of the next attempt, small model on CPUs: ours beside torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, RESTARTS, TARGET = "2", "3", 0.5
VICTIM, STEPS_AFTER, LIMIT_S = 1, 55, 120.0
KILL_AT = {"at once": 25, "15 s into the training": 755}
"""The step after which rank VICTIM is killed: in the middle between two checkpoints; before and after spares are ready."""


def recovery(command: Callable[..., list[str]], kill_at: int) -> float:
    """Seconds from the kill after step `kill_at` to the first line of a step in the next attempt; LIMIT_S where none came.

    The peer's ranks sometimes wait for each other for ever after a restart, in gloo's rendezvous.

    Raises:
        RuntimeError: there was no next attempt, or it did not end well.
    """
    killed = took = None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        words = command(folder, str(kill_at + STEPS_AFTER))
        process = subprocess.Popen(words, env=measure.environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
        limit = threading.Timer(LIMIT_S, process.terminate)
        with process:
            for line in process.stdout or ():
                _, told, values = line.partition("STEP ")
                if not told:
                    continue
                attempt, rank, pid, step = map(int, values.split())
                if killed is None and rank == VICTIM and step >= kill_at:
                    os.kill(pid, signal.SIGKILL)
                    killed = time.monotonic()
                    limit.start()
                elif took is None and killed is not None and attempt > 0:
                    took = time.monotonic() - killed
                    limit.cancel()
        if killed is not None and took is None and time.monotonic() - killed >= LIMIT_S:
            return LIMIT_S
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

    def ours(folder: str, steps: str) -> list[str]:
        return measure.worldsize_run(*options, str(programs / "restart_ours.py"), folder, steps)

    def peer(folder: str, steps: str) -> list[str]:
        return measure.torchrun("--standalone", *options, str(programs / "restart_torchrun.py"), folder, steps)

    for when, step in KILL_AT.items():
        found = measure.pairs(partial(recovery, ours, step), partial(recovery, peer, step), count)
        what = f"SIGKILL {when} to next step"
        measure.report([measure.compare(what, *found, unit="s", against="torchrun", target=TARGET)])


if __name__ == "__main__":
    main()
