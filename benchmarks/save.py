"""Room: how long a training stands still for a save, sharded over all GPUs: ours beside torch.save and DCP's async_save."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import measure

LIMIT_S = 0.5


def undisturbed(turns: list[list[float]]) -> float:
    """The time of an iteration with nothing beside it: the shortest of all, since memory is prepared early on."""
    return min(seconds for turn in turns for seconds in turn)


def stalls(turns: list[list[float]]) -> list[float]:
    """For each turn with a save: its first iteration less an undisturbed one, in seconds."""
    return [turn[0] - undisturbed(turns) for turn in turns[1:]]


def slowdown(turns: list[list[float]]) -> float:
    """How much longer iterations take while a save is written behind them."""
    return statistics.median(seconds for turn in turns[2:] for seconds in turn[1:]) / undisturbed(turns)


def compared(seen: dict[str, Any]) -> list[measure.Comparison]:
    """The later saves beside each peer's, and the first one, in which everyone allocates."""
    what = f"stall of a save, {seen['params'] / 1e9:.3g} B parameters, {seen['ranks']} x {seen['device']}"
    ours = stalls(seen["ways"]["ours"])
    found = []
    for peer, turns in seen["ways"].items():
        if peer == "ours":
            continue
        theirs, target = stalls(turns), 1.0 if peer in ("torch.save", "DCP async_save") else None
        found.append(
            measure.compare(what, ours[1:], theirs[1:], unit="s", against=peer, target=target, limit=LIMIT_S)
        )
        found.append(measure.compare(f"{what}, the first", ours[:1], theirs[:1], unit="s", against=peer))
    return found


def main() -> None:
    """Measure and print."""
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if cuda else 2)
    parser.add_argument("--params", type=float, default=1e9 if cuda else 2e6)
    parser.add_argument(
        "--turns", type=int, default=4, help="the first without a save, the second with the first one"
    )
    parser.add_argument("--dir", help="where to write; a temporary folder where not given")
    parser.add_argument("--timeout", type=float, default=900.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        words = ("--params", str(asked.params), "--turns", str(asked.turns), "--dir", folder)
        command = measure.worldsize_run(
            "--nproc-per-node", str(asked.ranks), str(measure.PROGRAMS / "saves.py"), *words
        )
        seen = measure.answer(command, asked.timeout)
    measure.report(compared(seen))
    for name, turns in seen["ways"].items():
        each = ", ".join(f"{seconds:.3f}" for seconds in stalls(turns))
        print(f"  {name}: stalls {each} s; iterations while it writes: {slowdown(turns):.2f} x")


if __name__ == "__main__":
    main()
