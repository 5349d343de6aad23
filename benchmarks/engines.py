"""Room: a decoder of a billion parameters on all GPUs: our fsdp and ZeRO-3 beside the engines' own loops."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec

import measure

PAIRS = {"fsdp": "FSDP2 by hand", "zero3": "DeepSpeed by hand"}
TARGET = 1.02
SMALL = {"width": 64, "layers": 2, "words": 128, "length": 32, "batch": 2, "steps": 12}


def seen(variant: str, asked: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step and the peak of the device's memory of one variant, in fresh processes."""
    sizes = {"batch": asked.batch} if asked.cuda else SMALL
    with tempfile.TemporaryDirectory() as folder:
        words = [word for name, value in {**sizes, "dir": folder}.items() for word in (f"--{name}", str(value))]
        program = str(measure.PROGRAMS / "decoder.py")
        command = measure.worldsize_run("--nproc-per-node", str(asked.ranks), program, variant, *words)
        return measure.answer(command, asked.timeout)


def main() -> None:
    """Measure and print."""
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if cuda else 2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="fsdp,zero3")
    parser.add_argument("--batch", type=int, default=4, help="rows of 1,024 tokens on each GPU")
    parser.add_argument("--timeout", type=float, default=300.0)
    asked = parser.parse_args()
    asked.cuda = cuda
    for engine in asked.engines.split(","):
        if engine == "zero3" and find_spec("deepspeed") is None:
            print("not measured: zero3: the package deepspeed is not installed", flush=True)
            continue
        rounds: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
        for number in range(asked.rounds):
            for which in ("ours", "plain") if number % 2 == 0 else ("plain", "ours"):
                rounds[which].append(seen(f"{engine}-{which}", asked))
                numbers = ", ".join(f"{name} {value:.4g}" for name, value in rounds[which][-1].items())
                print(f"  {engine} {which}: {numbers}", file=sys.stderr, flush=True)
        for number, unit, scale in (("ms", "ms", 1.0), ("peak", "GB", 1e-9))[: 2 if cuda else 1]:
            ours, plain = ([each[number] * scale for each in rounds[which]] for which in ("ours", "plain"))
            what = f"{'step' if number == 'ms' else 'peak memory'}, decoder, {engine}, {asked.ranks} ranks"
            what += f", batch {asked.batch}" if cuda else ""
            measure.report([measure.compare(what, ours, plain, unit=unit,
                                            against=PAIRS[engine], target=TARGET)])  # fmt: skip


if __name__ == "__main__":
    main()
