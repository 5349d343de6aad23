"""A training as a job on the real Slurm: submitted by our command, watched by Slurm's, judged by what its run folder holds."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.launch import env, shell
from worldsize.launch.slurm.states import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.testing.slurm import Cluster

HERE = Path(__file__).parent
LONGEST = 600.0


@dataclass(frozen=True)
class Job:
    """One job, its folder and that of its training."""

    cluster: Cluster
    id: str
    folder: Path
    run: Path

    @property
    def log(self) -> str:
        """What all attempts printed, and the record of their ends."""
        logs = sorted(self.folder.glob("slurm-*.out"))
        return "".join(path.read_text(errors="replace") for path in logs)

    @property
    def state(self) -> str:
        """Slurm's word."""
        return self.ask("%T")

    @property
    def nodes(self) -> str:
        """Where it runs."""
        return self.ask("%N")

    def ask(self, what: str) -> str:
        """One field of squeue."""
        argv = ["squeue", "--noheader", "--states=all", "--jobs", self.id, f"--format={what}"]
        return self.cluster.run(argv).out.strip()

    def until(self, fact: Callable[[], bool], what: str) -> None:
        """Wait for it."""
        end = time.monotonic() + LONGEST
        while not fact():
            assert time.monotonic() < end, f"{what}: not within {LONGEST:.0f} s; {self.state}\n{self.log}"
            time.sleep(0.2)

    def steps_beyond(self, step: int, attempt: int = 0) -> None:
        """Wait until its attempt has made a step after this one."""
        self.until(
            lambda: any(row["attempt"] == attempt and row["step"] > step for row in self.ledger()), f"step {step}"
        )

    def ends(self) -> str:
        """Wait for the end; its state."""
        self.until(self._over, "the end")
        return self.state

    def _over(self) -> bool:
        """Whether it has ended for good: one that goes back into the queue looks ended for a moment."""
        if self.state not in ENDED:
            return False
        time.sleep(2)
        return self.state in ENDED

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the run's timeline says of one kind, across attempts."""
        return [row for row in _rows(self.run / "events.jsonl") if row["event"] == kind]

    def ledger(self) -> list[dict[str, Any]]:
        """Which samples each rank was given, in all attempts."""
        return [row for path in sorted(ledger(self.run).glob("*.jsonl")) for row in _rows(path)]

    def losses(self) -> dict[int, float]:
        """By step; where a step was made again, the last time counts."""
        return losses(self.run)


def ledger(run: Path) -> Path:
    """The folder in which ranks write what they were given."""
    return run.with_name(f"{run.name}-ledger")


def losses(run: Path) -> dict[int, float]:
    """By step; where a step was made again, the last time counts."""
    return {row["step"]: row["loss"] for row in _rows(run / "metrics.jsonl") if "loss" in row}


def repeated(rows: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """(epoch, sample) -> how often it was given to a rank."""
    return Counter((row["epoch"], number) for row in rows for number in row["ids"])


def submit(cluster: Cluster, folder: Path, program: Path, options: tuple[str, ...], words: tuple[str, ...]) -> Job:
    """Hand a program over, whose first argument is its run folder."""
    run = folder / "run"
    places = ("--chdir", str(folder), "--job-dir", str(folder / "job"), "--env", f"WORLDSIZE_LEDGER={ledger(run)}")
    argv = [
        sys.executable,
        "-m",
        "worldsize",
        "submit",
        str(program),
        *places,
        "--env",
        "OMP_NUM_THREADS=1",
        *options,
    ]
    done = shell.call([*argv, "--", str(run), *words], {**cluster.env, "HOME": str(folder)}, timeout=120, cwd=folder)
    assert done.code == 0, done.err
    return Job(cluster, done.out.strip(), folder / "job", run)


@cache
def alone(program: Path, *words: str) -> dict[int, float]:
    """The same program on one rank here, never disturbed: its losses."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        plain = {**env.read(), "OMP_NUM_THREADS": "1", "WORLDSIZE_LEDGER": str(ledger(run))}
        done = shell.call([sys.executable, str(program), str(run), *words], plain, timeout=LONGEST)
        assert done.code == 0, done.err
        return losses(run)


def same(found: dict[int, float], expected: dict[int, float], tolerance: float = 1e-10) -> None:
    """The same losses at the same steps, relatively."""
    assert found.keys() == expected.keys()
    worst = max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())
    assert worst < tolerance, worst


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole by now."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]
