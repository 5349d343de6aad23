"""Room: how long the training of a language model stands still for a save of its whole state, and what the writing costs it."""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llm
import measure
import recipe

STALL_S, SLOWER, KEPT = 1.0, 1.05, 2
WARM, AFTER = 4, 6
"""Steps that are not looked at, at the beginning; and those that are made after the last save was written."""


@dataclass(frozen=True)
class Seen:
    """One save.

    Attributes:
        stall: the iteration in which it began, less an undisturbed one, in seconds.
        told: what the run itself says that the training stood still, in seconds.
        ratio: iterations while it was written over undisturbed ones, of their medians; NaN where none fell into that time.
        seconds: from its begin to its commit.
        size: bytes.
    """

    stall: float
    told: float
    ratio: float
    seconds: float
    size: float


def saves(run: Path) -> list[dict[str, Any]]:
    """The commits that the run tells."""
    return [row for row in recipe.rows(run / "events.jsonl") if row["event"] == "save"]


def looked_at(run: Path, tokens: int) -> list[Seen]:
    """Every save beside the steps around it.

    Args:
        run: the run folder; each step has a line with its speed, which waits for the device's work.
        tokens: of a step, on a device.
    """
    steps = [(row["step"] + 1, row["time"], tokens / row[recipe.SPEED]) for row in recipe.speeds(run)]
    ends = {number: end for number, end, _ in steps}
    spans = [(save, ends[save["step"]], ends[save["step"]] + save["seconds"]) for save in saves(run)]
    quiet = [
        taken for number, end, taken in steps
        if number > WARM and not any(end > begin and end - taken < finish for _, begin, finish in spans)
    ]  # fmt: skip
    usual, found = statistics.median(quiet), []
    for save, begin, finish in spans:
        first = save["step"] + 1
        beside = [taken for number, end, taken in steps if number > first and begin < end <= finish]
        stall = next(taken for number, _, taken in steps if number == first) - usual
        ratio = statistics.median(beside) / usual if beside else math.nan
        found.append(Seen(stall, save["stall"], ratio, save["seconds"], save["bytes"]))
    return found


def training(asked: argparse.Namespace, shape: str, count: int, every: int) -> tuple[list[Seen], list[str]]:
    """Train until `count` saves are committed and some steps more were made; the saves, and the checkpoints that are left."""
    wanted = {
        "max_seq_len": asked.length, "micro_batch": asked.batch, "global_batch": asked.batch * asked.ranks,
        "strategy": "fsdp" if asked.ranks > 1 else "single", "save_steps": every, **recipe.given(asked.ours),
    }  # fmt: skip

    def enough(run: Path) -> bool:
        done = saves(run)
        last = done[-1]["time"] if done else 0.0
        return len(done) >= count and sum(row["time"] > last for row in recipe.speeds(run)) >= AFTER

    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        run = recipe.trained(Path(folder), shape, wanted, ranks=asked.ranks, enough=enough, timeout=asked.timeout)
        left = sorted(
            path.name for path in (run / "checkpoints").glob("step-*") if (path / "manifest.json").is_file()
        )
        return looked_at(run, asked.batch * asked.length)[:count], left


def main() -> None:
    """Measure and print."""
    import torch

    cards = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default=("8B" if cards > 1 else "3B") if cards else "tiny", choices=list(llm.SHAPES)
    )
    parser.add_argument(
        "--small", default="1B" if cards else "tiny", help="shape for the part that keeps the last two"
    )
    parser.add_argument("--ranks", type=int, default=cards or 2)
    parser.add_argument("--length", type=int, default=4096 if cards else 64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--every", type=int, default=60, help="a save of the large shape begins after so many steps")
    parser.add_argument(
        "--saves", type=int, default=1, help="of the large shape; one commit more must fit the disk; 0 leaves it out"
    )
    parser.add_argument(
        "--small-every", type=int, default=300, help="the same; enough steps for a save to be written"
    )
    parser.add_argument("--small-saves", type=int, default=4, help="of the small shape; 0 leaves that part out")
    parser.add_argument(
        "--ours", default="compile=true" if cards else "precision=fp32", help="settings, name=value,..."
    )
    parser.add_argument("--dir", help="where to write; a temporary folder where not given")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds that one training may take")
    asked = parser.parse_args()
    if asked.saves:
        seen, _ = training(asked, asked.shape, asked.saves, asked.every)
        report(seen, f"llama {asked.shape}, {asked.ranks} ranks")
    if asked.small_saves:
        seen, left = training(asked, asked.small, asked.small_saves, asked.small_every)
        report(seen, f"llama {asked.small}, {asked.ranks} ranks")
        kept = len(left) == min(KEPT, asked.small_saves)
        print(
            f"checkpoints left of {asked.small_saves}: {', '.join(left)}{'  met' if kept else '  MISSED'}", flush=True
        )


def report(seen: list[Seen], what: str) -> None:
    """The stalls, and how much slower steps are."""
    stalls, ratios = [each.stall for each in seen], [each.ratio for each in seen if not math.isnan(each.ratio)]
    what = f"of {len(seen)} saves of {seen[0].size / 1e9:.3g} GB, {what}"
    measure.report([measure.Comparison(f"longest stall {what}", max(stalls), None, "s", "nobody", limit=STALL_S)])
    if ratios:
        slower = statistics.median(ratios)
        said = f"steps while they are written, {what}"
        measure.report([measure.Comparison(said, slower, None, "x", "nobody", limit=SLOWER)])
    for each in seen:
        print(
            f"  stall {each.stall:.3f} s (the run itself: {each.told:.3f} s), written in {each.seconds:.1f} s"
            f" ({each.size / each.seconds / 1e9:.2f} GB/s), steps meanwhile {each.ratio:.3f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
