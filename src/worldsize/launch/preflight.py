"""Room: whether a run that was begun fits the ranks that a job asks for: told before it waits in a queue."""

from __future__ import annotations

import json
from pathlib import Path

from worldsize.errors import ConfigError

REPLICATED = ("", "single", "ddp", "fsdp")
"""Strategies under which every rank has micro-batches of its own; "" is what a program chooses."""


def fits(run_dir: str, ranks: int, strategy: str = "") -> None:
    """Check the batch arithmetic of the run in a folder; a folder without one fits.

    Args:
        run_dir: the run folder.
        ranks: how many the job has.
        strategy: the one that is asked for; under others than `REPLICATED` several ranks share a micro-batch.

    Raises:
        ConfigError: a rank would never work; or the folder holds something else under run.json's name.
    """
    file = Path(run_dir) / "run.json"
    if strategy not in REPLICATED or not file.is_file():
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))["config"]
        whole, part = int(config["global_batch"]), int(config["micro_batch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged", found=repr(error), do="restore it, or use a new run_dir") from error
    micro = -(-whole // part)
    if ranks > micro:
        raise ConfigError(
            "the run in run_dir has fewer micro-batches in a step than the job has ranks: some would never work",
            found=f"{ranks} ranks, global_batch {whole} = {micro} micro-batches of {part}",
            do=f"ask for at most {micro} ranks, or begin a run with a smaller micro_batch",
        )
