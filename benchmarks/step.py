"""Room: the time of a training step of two small networks: ours beside loops by hand, accelerate and Fabric."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import measure

GPU_SHAPES = {"512x4 batch 64": (512, 4, 64), "2048x8 batch 256": (2048, 8, 256)}
CPU_SHAPES = {"64x2 batch 8": (64, 2, 8)}
PEERS: dict[str, tuple[str, str, float | None]] = {
    "raw": ("ours", "whole", 1.00),
    "tuned": ("ours-fused", "steady", 1.02),
    "accelerate": ("ours", "whole", None),
    "fabric": ("ours", "whole", None),
}
"""Peer -> which of our loops it is compared with, which of its times, and the target."""
MODULES = {"accelerate": "accelerate", "fabric": "lightning"}
TOLD = {"raw": "by hand", "tuned": "by hand, tuned"}


def loops() -> list[str]:
    """The loops that can run here; says which cannot."""
    missing = {peer: module for peer, module in MODULES.items() if find_spec(module) is None}
    for peer, module in missing.items():
        print(f"not measured: {peer}: the package {module} is not installed", flush=True)
    return ["ours", "ours-fused", *(peer for peer in PEERS if peer not in missing)]


def run(shape: tuple[int, int, int], asked: argparse.Namespace, *, in_memory: bool) -> dict[str, Any]:
    """Train this shape by every loop and return what the ranks saw."""
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        options = {"width": shape[0], "layers": shape[1], "batch": shape[2], "steps": asked.steps}
        options |= {"rounds": asked.rounds, "workers": asked.workers, "loops": asked.loops, "dir": folder}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += ["--in-memory"] * in_memory + ["--profile"] * asked.profile
        program = str(measure.PROGRAMS / "steps.py")
        command = measure.worldsize_run("--nproc-per-node", str(asked.ranks), program, *words)
        return measure.answer(command, asked.timeout, shown="host time of" if asked.profile else None)


def compared(name: str, seen: dict[str, Any]) -> list[measure.Comparison]:
    """Our rounds beside each peer's."""
    found = []
    where = f"{seen['ranks']} x {seen['device']}"
    for peer, (mine, column, target) in PEERS.items():
        if peer in seen["loops"] and mine in seen["loops"]:
            ours = [each["steady"] for each in seen["loops"][mine]]
            theirs = [each[column] for each in seen["loops"][peer]]
            told = TOLD.get(peer, peer)
            found.append(
                measure.compare(f"step {name}, {where}", ours, theirs, unit="ms", against=told, target=target)
            )
    if {"raw", "ours"} <= set(seen["loops"]):
        ours, theirs = ([each["steady"] for each in seen["loops"][which]] for which in ("ours", "raw"))
        told = "by hand, its starts of epochs left out"
        found.append(measure.compare(f"step {name}, {where}", ours, theirs, unit="ms", against=told))
    return found


def arguments() -> argparse.Namespace:
    """What to measure."""
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if cuda else 2)
    parser.add_argument("--rounds", type=int, default=7 if cuda else 3)
    parser.add_argument("--steps", type=int, default=200 if cuda else 60)
    parser.add_argument("--workers", type=int, default=4 if cuda else 1)
    parser.add_argument("--loops", help="a list such as ours,raw; all that can run where not given")
    parser.add_argument("--data", choices=["items", "memory", "both"], default="both")
    parser.add_argument("--profile", action="store_true", help="also print where our host time goes")
    parser.add_argument("--dir", help="for the run folders; a temporary folder where not given")
    parser.add_argument("--timeout", type=float, default=600.0)
    asked = parser.parse_args()
    asked.shapes = GPU_SHAPES if cuda else CPU_SHAPES
    asked.loops = asked.loops or ",".join(loops())
    return asked


def main() -> None:
    """Measure and print."""
    asked = arguments()
    for name, shape in asked.shapes.items():
        for in_memory in (False, True):
            if asked.data in ("both", "memory" if in_memory else "items"):
                told = f"{name}, data in memory" if in_memory else name
                measure.report(compared(told, run(shape, asked, in_memory=in_memory)))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
