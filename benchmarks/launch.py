"""Room: from the command to the first line of a program that does nothing, on 2 processes: ours beside torchrun."""

from __future__ import annotations

import argparse
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, TARGET = "2", 0.25
LIMIT_S = 120.0


def first_line(command: Sequence[str]) -> float:
    """Seconds from starting the command to the first line of the program."""
    began = time.monotonic()
    with subprocess.Popen(command, env=measure.environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.rstrip().endswith("here"):
                took = time.monotonic() - began
                break
        else:
            raise RuntimeError(f"{' '.join(command)} printed nothing")
        process.stdout.read()
        if process.wait(LIMIT_S):
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return took


def main() -> None:
    """Measure pairs and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    count = parser.parse_args().pairs
    program = str(measure.PROGRAMS / "noop.py")
    ours = partial(first_line, measure.worldsize_run("--nproc-per-node", RANKS, program))
    peer = partial(first_line, measure.torchrun("--standalone", "--nproc-per-node", RANKS, program))
    ours(), peer()  # the first start of each reads its files from the disk
    found = measure.pairs(ours, peer, count)
    measure.report([measure.compare("command to first line", *found, unit="s", against="torchrun", target=TARGET)])


if __name__ == "__main__":
    main()
