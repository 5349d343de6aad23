"""Room: what `worldsize plan` says of a layout's peak memory, beside what each rank's allocator says.

    python benchmarks/plan.py               on what there is: GPUs (shared by ranks, where they are few), or CPUs
    python benchmarks/plan.py --only fsdp --size large

Errors are of the busiest rank. Exit code 1: a peak was more than 10% off, or above what the plan would call enough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worldsize.tools.plan import judge, machine
from worldsize.tools.plan.asking import Program, answers
from worldsize.tools.trial import Layout

PROGRAMS = Path(__file__).parent / "programs"
MOST = 0.10
TRIES, CLOSE = 3, 1.005
MIB = 2**20

SIZES = {
    "tiny": ["--width", "128", "--depth", "2", "--words", "512", "--length", "64"],
    "small": ["--width", "512", "--depth", "8", "--words", "8192", "--length", "512"],
    "large": ["--width", "1536", "--depth", "12", "--words", "32768", "--length", "1024"],
}
CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("single:1", ("--precision", "bf16")),
    ("single:1", ("--precision", "fp32", "--fused", "--drop", "0.1")),
    ("single:1", ("--precision", "bf16", "--recompute")),
    ("ddp:2", ("--precision", "bf16")),
    ("ddp:4", ("--precision", "fp32", "--micro-batch", "8")),
    ("fsdp:2", ("--precision", "bf16")),
    ("fsdp:4", ("--precision", "bf16", "--recompute", "--init", "meta")),
    ("hsdp+replicas2:4", ("--precision", "bf16")),
    ("tp2:2", ("--precision", "bf16")),
    ("fsdp+tp2:4", ("--precision", "bf16")),
    ("pp2:2", ("--precision", "bf16")),
    ("pp2+schedule=gpipe:2", ("--precision", "bf16")),
    ("pp4:4", ("--precision", "bf16")),
    ("fsdp+pp2:4", ("--precision", "bf16")),
    ("ddp:2", ("--precision", "fp16", "--fused", "--drop", "0.1")),
)


@dataclass(frozen=True)
class Real:
    """What the allocators of all ranks said, in bytes; of the busiest.

    Attributes:
        peak: allocated at most.
        reserved: of the device, for blocks and what lies between them.
        outside: taken of the device beside the allocator, a rank's share.
    """

    peak: int
    reserved: int
    outside: int


def real(layout: Layout, args: list[str], folder: Path) -> Real:
    """Run three steps."""
    out = folder / "ranks"
    out.mkdir()
    program = [str(PROGRAMS / "peak.py"), str(out), str(PROGRAMS / "planned.py"), "--dir", str(folder / "run"), *args]
    command = [sys.executable, "-m", "worldsize", "run", "--nproc-per-node", str(layout.ranks), *program]
    env = {**os.environ, **layout.options, "OMP_NUM_THREADS": "1", "WORLDSIZE_STALL": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=500)
    found = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
    if len(found) < layout.ranks:
        raise SystemExit(f"{layout}: the real run failed\n{(done.stdout + done.stderr)[-2000:]}")
    used = max(each.get("used", 0) for each in found)
    outside = (used - sum(each.get("now", 0) for each in found)) // len(found) if used else 0
    return Real(max(each["peak"] for each in found), max(each["reserved"] for each in found), outside)


def main() -> None:
    """Compare layout by layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="large" if cuda else "tiny")
    parser.add_argument("--only", default="", help="layouts that hold this text")
    parser.add_argument("--gpu", default="h200-141g", help="what the plan is asked for")
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    asked = parser.parse_args()
    gpu, rows = machine.find(asked.gpu), []
    print(
        f"{'layout':<24} {'settings':<44} {'planned':>9} {'real':>9} {'error':>7} {'reserved':>9} {'outside':>8} {'needed':>9}"
    )
    for text, settings in CASES:
        if asked.only and asked.only not in text:
            continue
        row = compared(Layout.parse(text), [*SIZES[asked.size], *_low(settings, cuda)], gpu, cuda=cuda)
        rows.append({"layout": text, "settings": " ".join(settings), **row})
        print(_line(rows[-1]), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))
    bad = [row["layout"] for row in rows if abs(row["error"]) > MOST or (cuda and row["taken"] > row["needed"])]
    print(
        f"{len(rows)} layouts, largest error {max(abs(row['error']) for row in rows):.1%}, off or too little: {bad or 'none'}"
    )
    sys.exit(bool(bad))


def _low(settings: tuple[str, ...], cuda: bool) -> list[str]:
    """CPUs are slow in few bits: there the same layouts in float32."""
    return list(settings) if cuda else [word.replace("bf16", "fp32").replace("fp16", "fp32") for word in settings]


def compared(layout: Layout, args: list[str], gpu: machine.Gpu, *, cuda: bool) -> dict[str, Any]:
    """One layout, planned and run."""
    program = Program(str(PROGRAMS / "planned.py"), tuple(args))
    questions = judge.questions(layout, layout.ranks, cuda=cuda)
    found = judge.worst(layout, answers(program, questions), gpu if cuda else None)
    if found.error:
        raise SystemExit(f"{layout}: cannot be planned: {found.error}")
    seen = _steady(layout, args, found.peak, tries=1 if cuda else TRIES)
    return {
        "planned": found.peak, "real": seen.peak, "error": found.peak / seen.peak - 1, "reserved": seen.reserved,
        "outside": seen.outside, "taken": seen.reserved + seen.outside, "needed": found.needed, "parts": found.parts,
    }  # fmt: skip


def _steady(layout: Layout, args: list[str], planned: int, *, tries: int) -> Real:
    """The least of so many runs, where the first holds more than planned.

    A thread of gloo's that comes late to its processor keeps the buffers of a collective that is over; which ones is chance.
    """
    runs: list[Real] = []
    while len(runs) < tries and all(run.peak > CLOSE * planned for run in runs):
        with tempfile.TemporaryDirectory() as name:
            runs.append(real(layout, args, Path(name)))
    return min(runs, key=lambda run: run.peak)


def _line(row: dict[str, Any]) -> str:
    sizes = {name: f"{row[name] / MIB:,.1f}" for name in ("planned", "real", "reserved", "outside", "needed")}
    return (
        f"{row['layout']:<24} {row['settings']:<44} {sizes['planned']:>9} {sizes['real']:>9} {row['error']:>+7.1%} "
        f"{sizes['reserved']:>9} {sizes['outside']:>8} {sizes['needed']:>9}"
    )


if __name__ == "__main__":
    main()
