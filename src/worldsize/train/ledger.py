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
        attempt: of several notes of a step, that of the last attempt holds.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._attempt = attempt
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank:04d}.jsonl").open("a", buffering=1, encoding="utf-8")

    def write(self, step: Step) -> None:
        """One line: step, epoch, ids, attempt."""
        row = {"step": step.index, "epoch": step.epoch, "ids": step.ids, "attempt": self._attempt}
        self._file.write(json.dumps(row) + "\n")
