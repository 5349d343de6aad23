"""Room: what a rank was really given: sample ids by step, one JSON line each, for audits against the order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.train.step import Step


class Ledger:
    """Notes each step of one rank.

    Args:
        folder: where; one file a rank, appended to.
        rank: whose.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank:04d}.jsonl").open("a", buffering=1, encoding="utf-8")

    def write(self, step: Step) -> None:
        """One line: step, epoch, ids, and the loss in all its digits."""
        row = {"step": step.index, "epoch": step.epoch, "ids": step.ids, "loss": float(step.loss)}
        self._file.write(json.dumps(row) + "\n")
