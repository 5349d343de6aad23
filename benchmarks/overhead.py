"""Room: what it costs that a run shows how it goes: of a step of 10 ms, at default settings."""

from __future__ import annotations

import argparse
import tempfile

import measure

STEP_US = 10_000.0
SHARE = 0.5
"""Percent of such a step that all of it may take."""


def main() -> None:
    """Measure and print. Steps of under a millisecond, so that what is measured is not lost in them.

    What counts is the thread's work, in the quietest tenth of the steps: others on the machine only ever add to it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, default=800)
    parser.add_argument("--timeout", type=float, default=900.0)
    asked = parser.parse_args()
    for ranks in asked.ranks:
        with tempfile.TemporaryDirectory() as folder:
            program = str(measure.PROGRAMS / "overhead.py")
            words = ["--dir", folder, "--blocks", str(asked.blocks)]
            command = measure.worldsize("run", "--nproc-per-node", str(ranks), "--device", "cpu", program, *words)
            seen = measure.answer(command, asked.timeout)
        # Flushes come once a second: in short steps they are spread over more of them than in steps of 10 ms.
        with_, without = seen["on"], seen["off"]
        percent = ((with_[0] - without[0]) / STEP_US + seen["flush"]) * 100
        for tenth in (0, 4):
            print(
                f"{ranks} ranks: {(tenth + 1) * 10}% of the steps take at most {without[tenth]:.0f} us of work without, "
                f"{with_[tenth]:.0f} us with: {with_[tenth] - without[tenth]:+.1f} us",
                flush=True,
            )
        print(f"  a flush, once a second: {seen['flush'] * 1e3:.2f} ms", flush=True)
        what = f"share of a 10 ms step, {ranks} ranks"
        measure.report([measure.Comparison(what, percent, None, "%", "", limit=SHARE)])


if __name__ == "__main__":
    main()
