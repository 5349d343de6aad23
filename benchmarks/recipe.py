"""Room: `worldsize llm train` as far as a benchmark needs it: a shape without weights, random tokens, no last commit."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llm
import measure
import psutil

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SPEED = "tokens_per_second_per_device"
_PAUSE_S = 0.2


def rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON that may still be written."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def speeds(run: Path) -> list[dict[str, Any]]:
    """The lines that tell a speed."""
    return [row for row in rows(run / "metrics.jsonl") if SPEED in row]


def given(settings: str) -> dict[str, str]:
    """name=value,... by name."""
    return dict(pair.split("=") for pair in settings.split(",") if pair)


def trained(
    place: Path, shape: str, settings: dict[str, Any], *, ranks: int, enough: Callable[[Path], bool], timeout: float
) -> Path:
    """Train a shape without weights on random tokens, as `until` does.

    Args:
        place: an empty folder.
        shape: of `llm.SHAPES`.
        settings: see `until`.
        ranks: see `until`.
        enough: see `until`.
        timeout: see `until`.
    """
    llm.prepare(place, llm.SHAPES[shape], int(settings["max_seq_len"]))
    return until(place, {"from_scratch": "true", **settings}, ranks=ranks, enough=enough, timeout=timeout)


def until(
    place: Path,
    settings: dict[str, Any],
    *,
    ranks: int,
    enough: Callable[[Path], bool],
    timeout: float,
    name: str = "run",
) -> Path:
    """Train until there is enough to see, then end it where it stands: a last commit is not what is measured.

    Args:
        place: the model and the tokens are in its folders of these names.
        settings: of `worldsize llm train`; max_seq_len is among them.
        ranks: how many processes.
        enough: asked of the run folder again and again.
        timeout: seconds that it may take.
        name: of the run folder.

    Returns:
        the run folder.

    Raises:
        RuntimeError: it failed, or there was not enough in time; with the end of what it printed.
    """
    run, log = place / name, place / f"{name}.log"
    all_of_them = {
        "init_ckpt": place / "model", "data_path": place / "tokens", "output_dir": run, "log_steps": 1,
        "train_steps": 1_000_000, "lr": "1e-4", "lr_schedule": "constant", **settings,
    }  # fmt: skip
    words = [word for name, value in all_of_them.items() for word in (f"--{name}", str(value))]
    start = measure.worldsize_run("--nproc-per-node", str(ranks), "-m", "worldsize")
    more = {"HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*start, "llm", "train", *words], stdout=file, stderr=file, env=measure.environment(**more)
        )
    until = time.monotonic() + timeout
    try:
        while not enough(run):
            if process.poll() is not None or time.monotonic() > until:
                how = "did not come far enough" if process.returncode is None else f"ended with {process.returncode}"
                raise RuntimeError(f"llm train {how}: {log.read_text(encoding='utf-8', errors='replace')[-2500:]}")
            time.sleep(_PAUSE_S)
    finally:
        _end(process)
    return run


def speed(
    shape: str, settings: dict[str, Any], asked: argparse.Namespace, ranks: int, strategy: str
) -> dict[str, float]:
    """Medians of the second half of asked.steps steps: tokens a second and device, MFU and the most memory where known."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"max_seq_len": asked.length, "strategy": strategy, **settings}
        run = trained(
            Path(folder), shape, wanted, ranks=ranks, timeout=asked.timeout,
            enough=lambda run: len(speeds(run)) >= asked.steps,
        )  # fmt: skip
        seen = speeds(run)[asked.steps // 2 : asked.steps]
    names = (SPEED, "mfu", "memory_gb")
    return {name: statistics.median(row[name] for row in seen) for name in names if name in seen[0]}


def fastest(
    tried: list[str], measured: Callable[[str], dict[str, float]], name: str, most: float | None = None
) -> tuple[str, dict[str, float]]:
    """Of settings the one with the most tokens a second, and what was seen; those that fail are told, and left out.

    Args:
        tried: settings.
        measured: gives what was seen under one.
        name: of whose they are.
        most: leave out what takes more gigabytes, where something else is left.

    Raises:
        RuntimeError: all failed.
    """
    found: dict[str, dict[str, float]] = {}
    for settings in tried:
        try:
            found[settings] = measured(settings)
            told(name, settings, found[settings])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"  {name} {settings} left out: {str(error)[-700:]}", file=sys.stderr, flush=True)
    if not found:
        raise RuntimeError(f"no setting of {name} works")
    small = {each: seen for each, seen in found.items() if most is None or seen.get("memory_gb", 0.0) <= most}
    best = max(small or found, key=lambda settings: found[settings][SPEED])
    return best, found[best]


def told(name: str, settings: str, seen: dict[str, float]) -> None:
    """One trial in a line, for who waits."""
    numbers = ", ".join(f"{what} {value:.4g}" for what, value in seen.items())
    print(f"  {name} [{settings}]: {numbers}", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The launcher first, so that it does not begin ranks again."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family[1:], timeout=30)
    process.wait()
