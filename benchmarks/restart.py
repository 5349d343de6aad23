"""Room: from SIGKILL of a rank to the first step of the next attempt, small model on CPUs: ours beside torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, RESTARTS, TARGET = "2", "3", 0.5
VICTIM, STEPS_AFTER, LIMIT_S, TRIES = 1, 55, 60.0, 5
KILL_AT = {"at once": 25, "15 s into the training": 755}
"""The step after which rank VICTIM is killed: between two checkpoints; in the first second of training, and later."""


def recovery(command: Callable[..., list[str]], kill_at: int) -> float | str:
    """Seconds from the kill after step `kill_at` to the first line of a step in the next attempt; why none came, else.

    Raises:
        RuntimeError: the kill was never due, or the next attempt did not end well.
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
        limit.cancel()
        errors.seek(0)
        said = f"{' '.join(words)} ended with {process.returncode}\n{errors.read()[-6000:]}"
    if killed is None or (took is not None and process.returncode):
        raise RuntimeError(said)
    return said if took is None else took


def ours_recovered(command: Callable[..., list[str]], kill_at: int) -> float:
    """Seconds of a recovery. Raises RuntimeError where there was none."""
    took = recovery(command, kill_at)
    if isinstance(took, str):
        raise RuntimeError(took)  # noqa: TRY004 - what is wrong is the launcher
    return took


def peer_recovered(command: Callable[..., list[str]], kill_at: int) -> float:
    """Seconds of the first recovery that succeeds.

    The peer's ranks often wait for each other for ever after a restart, or give up, in gloo's rendezvous. Those times are
    told and left out, so that they decide no ratio.
    """
    for _ in range(TRIES):
        took = recovery(command, kill_at)
        if not isinstance(took, str):
            return took
        print(f"  peer: no step within {LIMIT_S:g} s of the kill, left out", file=sys.stderr, flush=True)
    raise RuntimeError(took)


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
        found = measure.pairs(partial(ours_recovered, ours, step), partial(peer_recovered, peer, step), count)
        what = f"SIGKILL {when} to next step"
        measure.report([measure.compare(what, *found, unit="s", against="torchrun", target=TARGET)])


if __name__ == "__main__":
    main()
