"""The demo: a real training is killed, moved to other numbers of processes, and ends on the curve of an undisturbed one.

    make demo

Exit code 0 where all three checks at the end hold, 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).resolve().with_name("train.py").relative_to(ROOT))
LEAST_ACCURACY, LARGEST_DIFFERENCE, LEAST_EPOCHS = 0.97, 1e-10, 3
STOPPED, KILLED = 75, 128 + signal.SIGKILL


def main() -> int:
    """Train undisturbed, train disturbed, compare."""
    parser = argparse.ArgumentParser(description="Train, kill, go on elsewhere, compare.")
    parser.add_argument("--folder", type=Path, help="an empty folder for the two runs; a temporary one if not given")
    parser.add_argument("--epochs", type=int, default=4, help="at least 3: one to be killed in, one to be stopped in")
    args = parser.parse_args()
    if args.epochs < LEAST_EPOCHS:
        parser.error(f"--epochs must be at least {LEAST_EPOCHS}")
    began = time.monotonic()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="worldsize-demo-"))
    straight, disturbed = (Training(folder / name, args.epochs) for name in ("undisturbed", "disturbed"))
    print(
        "Real handwritten digits, one program, trained twice: undisturbed, and with everything that can happen to it."
    )
    print(f"   $ RUNS={shlex.quote(str(folder))}")
    print(
        "   $ export WORLDSIZE_LEDGER=$RUNS/<run>-ledger       # each process notes there which samples it was given"
    )
    print("   $ export OMP_NUM_THREADS=1                         # more threads are slower on images of 8 x 8 pixels")
    undisturbed(straight)
    interrupted(disturbed)
    passed = compare(straight, disturbed)
    print(f"\nThis took {time.monotonic() - began:.0f} s. Look further:")
    print(f"  worldsize checkpoint ls {disturbed.run}\n  cat {disturbed.run}/events.jsonl")
    return 0 if passed else 1


def undisturbed(training: Training) -> None:
    """The measure."""
    title("1. The measure: one process, never disturbed")
    Attempt(training, "--strategy", "single").ends_with(0)


def interrupted(training: Training) -> None:
    """Killed on two processes, stopped on one, finished on three."""
    title("2. The same program on two processes (DDP). Both are killed in the middle of an epoch")
    attempt = Attempt(training, "--nproc-per-node", "2", "--strategy", "ddp")
    attempt.reaches(epoch=1.5)
    attempt.kill()
    attempt.ends_with(KILLED)
    print(f"   newest committed checkpoint: {training.checkpoint()}")

    title("3. It goes on on one process, and is asked to stop (SIGTERM) in the middle of the next epoch")
    attempt = Attempt(training)
    attempt.reaches(epoch=2.5)
    attempt.stop()
    attempt.ends_with(STOPPED)
    print(f"   newest committed checkpoint: {training.checkpoint()}: nothing was lost, 75 says 'start me again'")

    title("4. It goes on to the end on three processes, each with a third of the model (FSDP)")
    Attempt(training, "--nproc-per-node", "3", "--strategy", "fsdp").ends_with(0)


def compare(straight: Training, disturbed: Training) -> bool:
    """Print the three checks; returns whether all of them hold."""
    title("Result")
    accuracy = disturbed.accuracy()
    steps, difference = largest_difference(straight, disturbed)
    epochs, odd = audit(disturbed)
    curve = f"largest relative loss difference to the undisturbed run: {difference:.1e} over {steps} steps"
    checks = (
        (
            accuracy >= LEAST_ACCURACY,
            f"accuracy on the held-out fifth: {accuracy:.2%} (at least {LEAST_ACCURACY:.0%})",
        ),
        (difference < LARGEST_DIFFERENCE and steps == straight.steps(), f"{curve} (below {LARGEST_DIFFERENCE:.0e})"),
        (
            not odd and epochs == straight.epochs,
            odd or f"every sample was seen exactly once in each of {epochs} epochs",
        ),
    )
    for holds, line in checks:
        print(f"   {'yes' if holds else 'NO '}  {line}")
    return all(holds for holds, _ in checks)


@dataclass(frozen=True)
class Training:
    """A run folder, and what its files say."""

    run: Path
    epochs: int

    @property
    def ledger(self) -> Path:
        """Where each rank writes which samples it was given."""
        return self.run.with_name(f"{self.run.name}-ledger")

    def deliveries(self) -> list[dict[str, Any]]:
        """What all ranks were given, in all attempts: step, epoch, ids, attempt."""
        return [row for path in sorted(self.ledger.glob("*.jsonl")) for row in rows(path)]

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of all attempts; a step that was made again comes again."""
        return [(row["step"], row["loss"]) for row in rows(self.run / "metrics.jsonl") if "loss" in row]

    def steps(self) -> int:
        """How many different steps were made."""
        return len({step for step, _ in self.losses()})

    def accuracy(self) -> float:
        """Of the last evaluation, from 0 to 1."""
        return [float(row["accuracy"]) for row in rows(self.run / "metrics.jsonl") if "accuracy" in row][-1]

    def description(self) -> dict[str, Any]:
        """What run.json says."""
        found: dict[str, Any] = json.loads((self.run / "run.json").read_text(encoding="utf-8"))
        return found

    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the last and shorter one included."""
        said = self.description()
        return -(-int(said["data"]["length"]) // int(said["config"]["global_batch"]))

    def checkpoint(self) -> str:
        """The name of the newest checkpoint; "" where there is none."""
        return max((path.name for path in (self.run / "checkpoints").glob("step-*")), default="")

    def saved(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        return int(self.checkpoint().removeprefix("step-") or 0)


class Attempt:
    """One start of the training under `worldsize run`; what it prints is shown, indented."""

    def __init__(self, training: Training, *options: str) -> None:
        self._training = training
        own = [str(training.run), "--duration", f"{training.epochs}ep", "--precision", "fp64", "--save-every", "10st"]
        command = ["run", *options, PROGRAM, *own]
        print(f"   $ worldsize {shlex.join(command).replace(str(training.run.parent), '$RUNS')}", flush=True)
        env = {**os.environ, "WORLDSIZE_LEDGER": str(training.ledger), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "worldsize", *command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._show)
        self._reader.start()

    def reaches(self, epoch: float) -> None:
        """Wait until a rank has noted a step past that part of the training, and a checkpoint lies inside that epoch.

        Checkpoints are written beside the training: on a busy machine one may be late. Raises SystemExit where the
        training ends before.
        """
        while self._process.poll() is None:
            seen = [row["step"] for row in self._training.deliveries()]
            if seen:
                each, saved = self._training.steps_per_epoch(), self._training.saved()
                if max(seen) >= int(epoch * each) and saved > int(epoch) * each and saved % each:
                    return
            time.sleep(0.02)
        self._reader.join()
        raise SystemExit(f"the training ended before epoch {epoch}, with exit code {self._process.returncode}")

    def kill(self) -> None:
        """SIGKILL to the process group of the ranks: no process of the training has a chance to tidy up."""
        ranks = [each for each in psutil.Process(self._process.pid).children() if PROGRAM in each.cmdline()]
        groups = {os.getpgid(each.pid) for each in ranks}
        for group in groups:
            print(f"   $ kill -KILL -{group}      # the {len(ranks)} ranks, at once", flush=True)
            os.killpg(group, signal.SIGKILL)

    def stop(self) -> None:
        """What a scheduler sends before it takes the machine away."""
        print(f"   $ kill -TERM {self._process.pid}", flush=True)
        self._process.send_signal(signal.SIGTERM)

    def ends_with(self, expected: int) -> None:
        """Wait for the end. Raises SystemExit where the exit code is another one."""
        code = self._process.wait()
        self._reader.join()
        print(f"   exit code {code}")
        if code != expected:
            raise SystemExit(f"the exit code should have been {expected}")

    def _show(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"     {line}", end="", flush=True)


def largest_difference(straight: Training, disturbed: Training) -> tuple[int, float]:
    """Steps in common, and the largest relative difference of a loss, steps that were made twice included."""
    measure, found = dict(straight.losses()), disturbed.losses()
    differences = [abs(loss - measure[step]) / abs(measure[step]) for step, loss in found]
    return len({step for step, _ in found} & set(measure)), max(differences)


def audit(training: Training) -> tuple[int, str]:
    """From what the ranks were really given: how many epochs, and what is wrong with the first bad one.

    A step that was made again after the kill counts once: as its latest attempt made it.
    """
    given = training.deliveries()
    latest = {row["step"]: 0 for row in given}
    for row in given:
        latest[row["step"]] = max(latest[row["step"]], row["attempt"])
    epochs: dict[int, Counter[int]] = {}
    for row in given:
        if row["attempt"] == latest[row["step"]]:
            epochs.setdefault(row["epoch"], Counter()).update(row["ids"])
    expected = Counter(range(int(training.description()["data"]["length"])))
    for epoch, seen in sorted(epochs.items()):
        if seen != expected:
            missing, again = expected - seen, seen - expected
            return len(epochs), f"epoch {epoch}: {missing.total()} samples not seen, {again.total()} seen again"
    return len(epochs), ""


def rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file; a line that a kill cut short is no line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def title(text: str) -> None:
    """A heading."""
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
