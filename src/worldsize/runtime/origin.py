"""Room: where this process comes from: when it began, in which job of a scheduler. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from worldsize.runtime import env
from worldsize.runtime.exits import EXIT_FILE


def began(otherwise: float) -> float:
    """When this process did, by the clock as it goes now: that of the boot may be off by seconds."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return otherwise
    return round(time.time() - age, 3)


def job() -> dict[str, Any]:
    """The scheduler's job, when it was handed over and when it began, where there is one. Seconds since 1970."""
    environ = env.read()
    number = environ.get("WORLDSIZE_JOB") or environ.get("SLURM_JOB_ID")
    if not number:
        return {}
    found: dict[str, Any] = {"job": number, "restarts": int(environ.get("SLURM_RESTART_COUNT") or 0)}
    start = environ.get("SLURM_JOB_START_TIME", "")
    if start.isdecimal():
        found["started"] = int(start)
    spec = Path(environ.get(EXIT_FILE) or "/nowhere").parent / "spec.json"
    if spec.is_file():
        # The last file that is written before sbatch is asked.
        found["submitted"] = round(spec.stat().st_mtime, 3)
    return found
