"""Room: adapters (LoRA) of a frozen decoder on one GPU: `worldsize llm train --lora_rank` beside transformers with peft."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import llm
import measure
import recipe

TIMES, MEMORY = 1 / 1.5, 0.8
"""Ratios: at least 1.5 times as many tokens a second, at most 0.8 times the memory."""
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
OURS = [f"compile=true,activation_checkpointing={mode}" for mode in ("none", "selective", "full")]
PEER = ["adapters=fp32", "adapters=fp32,checkpointing=true", "adapters=bf16", "adapters=bf16,checkpointing=true"]


def ours(asked: argparse.Namespace, settings: str) -> dict[str, float]:
    """Tokens a second and the most memory of our recipe."""
    wanted = {
        "precision": "bf16", "micro_batch": asked.batch, "global_batch": asked.batch, "lora_rank": asked.rank,
        "lora_targets": asked.targets, **recipe.given(settings),
    }  # fmt: skip
    return recipe.speed(asked.shape, wanted, asked, 1, "single")


def peft(asked: argparse.Namespace, settings: str) -> dict[str, float]:
    """The same of transformers and peft."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        llm.prepare(place, llm.SHAPES[asked.shape], asked.length)
        sizes = {name: getattr(asked, name) for name in ("length", "batch", "rank", "steps", "targets")}
        words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        program = [sys.executable, str(measure.PROGRAMS / "peft_llama.py"), "--folder", str(place / "model")]
        more = {"HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        return measure.answer([*program, "--settings", settings, *words], asked.timeout, **more)


def main() -> None:
    """Find the fastest setting of each that fits, then measure both in turn, and print."""
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8B" if cuda else "tiny", choices=list(llm.SHAPES))
    parser.add_argument("--length", type=int, default=4096 if cuda else 64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one training may take")
    parser.add_argument(
        "--ours",
        action="append",
        help="Settings of ours, as name=value,...; of several the fastest that fits is taken.",
    )
    parser.add_argument("--peer", action="append", help="The same of the peer: see programs/peft_llama.py.")
    asked = parser.parse_args()
    what = f"llama {asked.shape}, rank {asked.rank}, {asked.batch} x {asked.length} tokens"
    there = find_spec("peft") is not None
    most, theirs = None, ""
    if there:
        theirs, trial = recipe.fastest(asked.peer or (PEER if cuda else PEER[:1]), partial(peft, asked), "peft")
        # Both targets are for one setting: of ours, the fastest that keeps to the memory.
        most = MEMORY * trial["memory_gb"] if cuda else None
    own, _ = recipe.fastest(asked.ours or (OURS if cuda else ["compile=false"]), partial(ours, asked), "ours", most)
    seen: dict[str, list[dict[str, float]]] = {"ours": [], "peft": []}
    for number in range(asked.rounds):
        for which in ("ours", "peft") if number % 2 == 0 else ("peft", "ours"):
            if which == "ours" or there:
                settings, measured = (own, ours) if which == "ours" else (theirs, peft)
                seen[which].append(measured(asked, settings))
                recipe.told(which, settings, seen[which][-1])
    report(seen, what)


def report(seen: dict[str, list[dict[str, float]]], what: str) -> None:
    """Time and memory, beside the peer's where there is one."""
    for name, said, unit, target in (
        (recipe.SPEED, "a million tokens", "s", TIMES), ("memory_gb", "peak memory", "GB", MEMORY),
    ):  # fmt: skip
        found = {which: [each[name] for each in rounds if name in each] for which, rounds in seen.items()}
        if name == recipe.SPEED:
            found = {which: [1e6 / value for value in values] for which, values in found.items()}
        if found["ours"] and found["peft"]:
            measure.report([measure.compare(f"{said}, {what}", found["ours"], found["peft"], unit=unit,
                                            against="transformers + peft", target=target)])  # fmt: skip
        elif found["ours"]:
            middle = statistics.median(found["ours"])
            measure.report([measure.Comparison(f"{said}, {what}", middle, None, unit, "nobody")])
    if not seen["peft"]:
        print("not measured: transformers + peft: the package peft is not installed", flush=True)


if __name__ == "__main__":
    main()
