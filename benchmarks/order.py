"""Room: the first batch of a shuffled epoch, its time and its memory: ours beside torch's DistributedSampler."""

from __future__ import annotations

import argparse
import statistics
import sys

import measure

LENGTHS = ("1e6", "1e8", "1e12")
PEER_LENGTHS = ("1e8",)
"""The peer stores the order: 10**12 numbers would take 8 TB."""
LIMIT_MS = 1.0


def first_batch(which: str, length: str) -> tuple[float, float]:
    """Milliseconds and megabytes, in a process of its own."""
    found = measure.answer([sys.executable, str(measure.PROGRAMS / "first_batch.py"), which, length], 600)
    return float(found["ms"]), float(found["MB"])


def main() -> None:
    """Measure each length in turn, ours and the peer's one after the other, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    count = parser.parse_args().pairs
    medians = {}
    for length in LENGTHS:
        ours, peer = [], []
        for _ in range(count):
            ours.append(first_batch("ours", length))
            if length in PEER_LENGTHS:
                peer.append(first_batch("peer", length))
        for column, (what, unit, limit) in enumerate((("time", "ms", LIMIT_MS), ("memory", "MB", None))):
            mine = [each[column] for each in ours]
            told, against = f"first batch of {length} samples, {what}", "DistributedSampler"
            medians[what, length] = statistics.median(mine)
            if peer:
                theirs = [each[column] for each in peer]
                found = measure.compare(told, mine, theirs, unit=unit, against=against, limit=limit)
            else:
                found = measure.Comparison(told, medians[what, length], None, unit, against, limit=limit)
            measure.report([found])
    flat = [
        measure.Comparison(
            f"first batch, {what}: {LENGTHS[-1]} samples beside {LENGTHS[1]}",
            medians[what, LENGTHS[-1]],
            medians[what, LENGTHS[1]],
            unit,
            f"ours at {LENGTHS[1]}",
        )
        for what, unit in (("time", "ms"), ("memory", "MB"))
    ]
    measure.report(flat)


if __name__ == "__main__":
    main()
