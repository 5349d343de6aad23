"""Room: the small chain of tests/integration in many layouts, one after another in one set of processes on GPUs.

Started as `worldsize run ... engines.py FOLDER LAYOUT,PRECISION...`, or with layouts of one run joined by > to hand it on.
Rank 0 leaves FOLDER/<number>.json for each: losses and norms by step, or how it failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.integration import program, stack


def main() -> None:
    """Every one that was asked for."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = Path(sys.argv[1])
    for number, asked in enumerate(sys.argv[2:]):
        layouts, _, precision = asked.partition(",")
        answer = _tried(folder / f"run-{number}", layouts.split(">"), precision or "fp32")
        if os.environ.get("RANK", "0") == "0":
            (folder / f"{number}.json").write_text(json.dumps(answer), encoding="utf-8")


def _tried(folder: Path, layouts: list[str], precision: str) -> dict[str, Any]:
    """A run of 10 steps that each layout takes up where the one before left it."""
    found: dict[str, Any] = {"loss": {}, "norm": {}}
    try:
        for place, layout in enumerate(layouts):
            stop = None if place == len(layouts) - 1 else 2 * (place + 1)
            curve = stack.train(folder, layout, precision=precision, device="cuda", stop_after=stop)
            found["loss"] |= curve.losses
            found["norm"] |= curve.norms
    except Exception:  # noqa: BLE001 - the others must still be tried; the test shows it
        return {"error": traceback.format_exc()}
    assert len(found["loss"]) == 2 * program.STEPS_PER_EPOCH
    return found


if __name__ == "__main__":
    main()
