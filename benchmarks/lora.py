"""Room: adapters (LoRA) of a frozen decoder on one GPU: `worldsize llm train --lora_rank` beside transformers with peft."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import llm
import measure
import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

TIMES, MEMORY = 1 / 1.5, 0.8
"""Ratios: at least 1.5 times as many tokens a second, at most 0.8 times the memory."""
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
OURS = {
    "ours": [f"compile=true,activation_checkpointing={mode}" for mode in ("none", "selective")],
    "ours, fp8": ["precision=fp8,compile=true,activation_checkpointing=selective"],
}
"""In bf16, and with what is frozen in eight bits."""
PEER = [
    f"adapters={kind}{more}" for kind in ("fp32", "bf16") for more in ("", ",checkpointing=true", ",compile=true")
]


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
        "--ours", action="append", help="Settings of ours, as name=value,...: the fastest that fits is taken."
    )
    parser.add_argument("--eight", action="append", help="The same of ours in fp8.")
    parser.add_argument("--peer", action="append", help="The same of the peer: see programs/peft_llama.py.")
    asked = parser.parse_args()
    what = f"llama {asked.shape}, rank {asked.rank}, {asked.batch} x {asked.length} tokens"
    turns: dict[str, tuple[str, Callable[[str], dict[str, float]]]] = {}
    most = None
    if find_spec("peft") is not None:
        best, trial = recipe.fastest(asked.peer or (PEER if cuda else PEER[:1]), partial(peft, asked), "peft")
        turns["peft"] = best, partial(peft, asked)
        # Both targets are for one setting: of ours, the fastest that keeps to the memory.
        most = MEMORY * trial["memory_gb"] if cuda else None
    for name, given in (("ours", asked.ours), ("ours, fp8", asked.eight)):
        tried = given or (OURS[name] if cuda else ["compile=false"])
        if name == "ours" or given or (cuda and torch.cuda.get_device_capability() >= (8, 9)):
            turns[name] = recipe.fastest(tried, partial(ours, asked), name, most)[0], partial(ours, asked)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    for number in range(asked.rounds):
        for name in turns if number % 2 == 0 else reversed(turns):
            settings, measured = turns[name]
            seen[name].append(measured(settings))
            recipe.told(name, settings, seen[name][-1])
    theirs = seen.pop("peft", [])
    for name, rounds in seen.items():
        report(rounds, theirs, f"{what}{name.removeprefix('ours')}")
    if not theirs:
        print("not measured: transformers + peft: the package peft is not installed", flush=True)


def report(ours: list[dict[str, float]], theirs: list[dict[str, float]], what: str) -> None:
    """Time and memory, beside the peer's where there is one."""
    for name, said, unit, target in (
        (recipe.SPEED, "a million tokens", "s", TIMES), ("memory_gb", "peak memory", "GB", MEMORY),
    ):  # fmt: skip
        own, peer = ([each[name] for each in rounds if name in each] for rounds in (ours, theirs))
        if name == recipe.SPEED:
            own, peer = ([1e6 / value for value in values] for values in (own, peer))
        if own and peer:
            measure.report(
                [
                    measure.compare(
                        f"{said}, {what}", own, peer, unit=unit, against="transformers + peft", target=target
                    )
                ]
            )
        elif own:
            measure.report([measure.Comparison(f"{said}, {what}", statistics.median(own), None, unit, "nobody")])


if __name__ == "__main__":
    main()
