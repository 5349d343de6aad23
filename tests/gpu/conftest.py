"""Room: the batteries of trainings on 1, 2 and 4 GPUs, each started once, when a test first asks for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "battery.py"
DEVICE = "cuda"
LIMIT_S = 240
PLAN = {
    1: ["single-fp32", "single-fp64", "single-resume"],
    2: [
        f"{strategy}-{what}"
        for what in ("begin", "fp32", "fp64", "bf16", "fp16", "twice", "compiled")
        for strategy in ("ddp", "fsdp")
    ]
    + ["fsdp-offloaded", "ddp-to-fsdp", "fsdp-to-ddp", "fsdp-offloaded-to-ddp"],
    4: ["ddp-fp32", "fsdp-fp32", "ddp-resume", "fsdp-resume"],
}
"""Ranks -> the cases that one start runs."""
HANDED = {"single": "fsdp", "ddp": "fsdp", "fsdp": "ddp"}
"""Who takes up a run on another number of ranks -> who began it on two."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment for ranks: the package importable, and cuBLAS ready for deterministic algorithms."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **more}


def command(ranks: int, folder: Path, *cases: str) -> list[str]:
    """Start the battery on this many ranks."""
    launcher = [sys.executable, "-m", "worldsize", "run", "--nproc-per-node", str(ranks), "--device", DEVICE]
    return [*launcher, str(PROGRAM), str(folder), *cases]


@dataclass
class Batteries:
    """What each battery saw, by rank count and case."""

    root: Path
    _seen: dict[int, dict[str, Any]] = field(default_factory=dict)

    def folder(self, ranks: int) -> Path:
        """Where the battery of this rank count works."""
        return self.root / str(ranks)

    def seen(self, ranks: int, case: str) -> Mapping[str, Any]:
        """What a case saw; fails the test where it failed."""
        answer = self._of(ranks).get(case, {"error": f"no answer of {case} on {ranks} ranks"})
        if "error" in answer:
            pytest.fail(str(answer["error"]), pytrace=False)
        found: Mapping[str, Any] = answer
        return found

    def _of(self, ranks: int) -> dict[str, Any]:
        if ranks not in self._seen:
            if ranks != 2:
                self._hand_over(ranks)
            self._seen[ranks] = self._run(ranks)
        return self._seen[ranks]

    def _hand_over(self, ranks: int) -> None:
        """What was begun on 2 ranks is taken up by other layouts, each in a copy."""
        self._of(2)
        for strategy, begun in HANDED.items():
            source = self.folder(2) / f"begun-{begun}"
            if f"{strategy}-resume" in PLAN[ranks] and source.exists():
                shutil.copytree(source, self.folder(ranks) / f"resumed-{strategy}")

    def _run(self, ranks: int) -> dict[str, Any]:
        folder = self.folder(ranks)
        began = time.monotonic()
        done = subprocess.run(
            command(ranks, folder, *PLAN[ranks]), env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
        print(f"battery on {ranks}: {time.monotonic() - began:.0f} s, code {done.returncode}")  # noqa: T201 - pytest keeps it
        answers = {
            case: json.loads(path.read_text(encoding="utf-8"))
            for case in PLAN[ranks]
            if (path := folder / f"{case}.json").exists()
        }
        missing = {"error": f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"}
        return {case: answers.get(case, missing) for case in PLAN[ranks]}


@pytest.fixture(scope="session")
def batteries(tmp_path_factory: pytest.TempPathFactory) -> Batteries:
    """The batteries of this session."""
    return Batteries(tmp_path_factory.mktemp("gpu"))
