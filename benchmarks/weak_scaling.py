"""Room: how tokens a second and GPU hold up when the same work a GPU is done on more of them: `worldsize llm train` of 1 B."""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial

import llm
import measure
import recipe

EFFICIENCY = 0.97
"""Of what one GPU does, at least so much on each of many."""
SETTINGS = [f"compile=true,strategy={each}" for each in ("fsdp,reshard=false", "fsdp", "ddp")]


def speed(asked: argparse.Namespace, ranks: int, settings: str) -> dict[str, float]:
    """Tokens a second and GPU on so many ranks, each with the same share of the step."""
    wanted = {
        "precision": asked.precision, "micro_batch": asked.batch, "global_batch": asked.batch * ranks, **recipe.given(settings),
    }  # fmt: skip
    return recipe.speed(asked.shape, wanted, asked, ranks, "single" if ranks == 1 else "ddp")


def counts(most: int) -> list[int]:
    """1, 2, 4, ... as many as there are."""
    return [count for count in (1 << power for power in range(10)) if count <= most]


def main() -> None:
    """Find the best setting for each number of ranks, then measure all of them in turn, and print."""
    import torch

    cards = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1B" if cards else "tiny", choices=list(llm.SHAPES))
    parser.add_argument("--ranks", type=int, default=cards or 2, help="the most")
    parser.add_argument("--length", type=int, default=llm.LENGTH if cards else 64)
    parser.add_argument("--batch", type=int, default=2, help="rows of a step on each rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16" if cards else "fp32")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one training may take")
    parser.add_argument(
        "--ours", action="append", help="Settings on several ranks, as name=value,...; the fastest is taken."
    )
    parser.add_argument("--alone", action="append", help="The same on one rank: what all others are compared with.")
    asked = parser.parse_args()
    several = asked.ours or (SETTINGS if cards else [""])
    alone = asked.alone or (["compile=true"] if cards else [""])
    chosen: dict[int, str] = {}
    for ranks in counts(asked.ranks):
        tried = alone if ranks == 1 else several
        chosen[ranks], _ = recipe.fastest(tried, partial(speed, asked, ranks), f"{ranks} ranks")
    times: dict[int, list[float]] = {ranks: [] for ranks in chosen}
    for number in range(asked.rounds):
        for ranks in chosen if number % 2 == 0 else reversed(chosen):
            seen = speed(asked, ranks, chosen[ranks])
            recipe.told(f"{ranks} ranks", chosen[ranks], seen)
            times[ranks].append(1e6 / seen[recipe.SPEED])
    report(times, f"llama {asked.shape}, {asked.batch} x {asked.length} tokens a rank")


def report(times: dict[int, list[float]], what: str) -> None:
    """Each number of ranks beside one."""
    for ranks, seconds in times.items():
        said = f"a million tokens on each of {ranks} ranks, {what}"
        if ranks == 1:
            measure.report([measure.Comparison(said, statistics.median(seconds), None, "s", "nobody")])
            continue
        found = measure.compare(said, seconds, times[1], unit="s", against="one rank", target=1 / EFFICIENCY)
        measure.report([found])
        assert found.ratio is not None
        print(f"  weak-scaling efficiency on {ranks}: {1 / found.ratio:.1%}", flush=True)
    if len(times) == 1:
        print("not measured: weak scaling: one GPU here", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
