"""Room: how a benchmark measures and reports: commands, interleaved pairs, medians, one table. Knows no benchmark."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
RESULTS = "WORLDSIZE_BENCH_RESULTS"
"""Environment variable: a file that gets one line of JSON for each comparison."""
_BEGIN = '{"'


@dataclass(frozen=True)
class Comparison:
    """Us beside a peer.

    Attributes:
        what: what was measured, with its sizes.
        ours: our median.
        peer: the peer's median, or None where there is no peer for it.
        unit: of both.
        against: who the peer is.
        target: the largest ratio that is good enough, or None where none was set.
        limit: the largest value of ours that is good enough, or None where none was set.
        ratio: median over pairs of ours / peer, where pairs were taken; else of the medians.
    """

    what: str
    ours: float
    peer: float | None
    unit: str
    against: str
    target: float | None = None
    limit: float | None = None
    ratio: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether every target is met; None where there is none."""
        checks = []
        if self.target is not None and self.ratio is not None:
            checks.append(self.ratio <= self.target)
        if self.limit is not None:
            checks.append(self.ours <= self.limit)
        return all(checks) if checks else None


def compare(
    what: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    unit: str,
    against: str,
    target: float | None = None,
    limit: float | None = None,
) -> Comparison:
    """A comparison of pairs: ours[i] and peer[i] were taken one right after the other."""
    ratios = [one / other for one, other in zip(ours, peer, strict=True)]
    return Comparison(
        what,
        statistics.median(ours),
        statistics.median(peer),
        unit,
        against,
        target,
        limit,
        statistics.median(ratios),
    )


def pairs(ours: Callable[[], float], peer: Callable[[], float], count: int) -> tuple[list[float], list[float]]:
    """Measure both in turn, `count` times, beginning with ours and with the peer alternately."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(count):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append((ours, peer)[which]())
            print(f"  {('ours', 'peer')[which]} {found[which][-1]:.4g}", file=sys.stderr, flush=True)
    return found


def report(found: Sequence[Comparison]) -> None:
    """Print a line each, and append them to the file that the environment names."""
    for each in found:
        print(line(each), flush=True)
    target = os.environ.get(RESULTS)
    if target:
        with Path(target).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(each) | {"met": each.met}) + "\n" for each in found)


def line(each: Comparison) -> str:
    """One comparison in words."""
    parts = [f"{each.what}: ours {each.ours:.4g} {each.unit}"]
    if each.peer is not None:
        parts.append(f"{each.against} {each.peer:.4g} {each.unit}")
    if each.ratio is not None:
        parts.append(f"ratio {each.ratio:.3g}" + (f" (target {each.target:.2f})" if each.target is not None else ""))
    if each.limit is not None:
        parts.append(f"limit {each.limit:g} {each.unit}")
    verdict = {True: "  met", False: "  MISSED", None: ""}[each.met]
    return ", ".join(parts) + verdict


def worldsize(*arguments: str) -> list[str]:
    """Our command, as a person starts it."""
    return [*_command("worldsize", "worldsize"), *arguments]


def worldsize_run(*arguments: str) -> list[str]:
    """Our launcher, as a person starts it."""
    return worldsize("run", *arguments)


def torchrun(*arguments: str) -> list[str]:
    """The peer's launcher, as a person starts it."""
    return [*_command("torchrun", "torch.distributed.run"), *arguments]


def environment(**more: str) -> Mapping[str, str]:
    """This process's environment, with the package importable, and more variables."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def answer(command: Sequence[str], timeout: float, *, shown: str | None = None, **more: str) -> dict[str, Any]:
    """Run a program to its end. Its answer is the last line of standard output that holds a JSON object.

    Args:
        command: what to run.
        timeout: seconds that it may take.
        shown: print the lines of its output between one that holds this text and the answer.
        more: environment variables.

    Raises:
        RuntimeError: it failed or gave no answer; with the end of what it printed.
    """
    done = subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False
    )
    lines = done.stdout.splitlines()
    at = [number for number, text in enumerate(lines) if text.endswith("}") and _BEGIN in text]
    if done.returncode or not at:
        told = f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{told}")
    first = next((number for number, text in enumerate(lines) if shown and shown in text), at[-1])
    print("\n".join(lines[first : at[-1]]), end="\n" if first < at[-1] else "", flush=True)
    found: dict[str, Any] = json.loads(lines[at[-1]][lines[at[-1]].index(_BEGIN) :])
    return found


def _command(name: str, module: str) -> list[str]:
    """The script beside this interpreter, else the module."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    return [beside] if beside else [sys.executable, "-m", module]
