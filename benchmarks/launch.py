"""Room: from the command to the first line of a program that does nothing, on 2 processes: ours beside torchrun."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, TARGET = "2", 0.25


def first_line(command: Sequence[str]) -> float:
    """Seconds from starting the command to the first line of the program.

    Raises:
        RuntimeError: it printed no such line, or failed.
    """
    took = None
    with tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=measure.environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with process:
            for line in process.stdout or ():
                if took is None and line.rstrip().endswith("here"):
                    took = time.monotonic() - began
        if process.returncode or took is None:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}\n{errors.read()}")
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
