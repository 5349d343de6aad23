"""Room: the small chain of tests/integration in many layouts, one after another in one set of processes on GPUs.

Started as `worldsize run ... engines.py FOLDER LAYOUT[,PRECISION[,STEPS]]...`; after so many steps a run stops.
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

from tests.integration import stack


def main() -> None:
    """Every one that was asked for."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = Path(sys.argv[1])
    for number, asked in enumerate(sys.argv[2:]):
        layout, precision, stop = f"{asked},,".split(",")[:3]
        answer = _tried(folder / f"run-{number}", layout, precision or "fp32", int(stop) if stop else None)
        if os.environ.get("RANK", "0") == "0":
            (folder / f"{number}.json").write_text(json.dumps(answer), encoding="utf-8")


def _tried(folder: Path, layout: str, precision: str, stop: int | None) -> dict[str, Any]:
    try:
        curve = stack.train(folder, layout, precision=precision, device="cuda", stop_after=stop)
    except Exception:  # noqa: BLE001 - the others must still be tried; the test shows it
        return {"error": traceback.format_exc()}
    return {"loss": curve.losses, "norm": curve.norms}


if __name__ == "__main__":
    main()
