"""Room: the sample ledger of a run: which samples at which step, from its order alone and as delivered. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from worldsize.data.batch import BatchPlan, ledger
from worldsize.errors import CheckpointError
from worldsize.tools.trial import deliveries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def planned(run: Path, first: int, stop: int) -> Iterator[tuple[int, int, list[int]]]:
    """(step, epoch, sample ids) of the steps first <= step < stop of a run folder.

    Raises:
        CheckpointError: the folder has no run.json, or the run's order is not its own (a sampler of the program's).
    """
    path = run / "run.json"
    if not path.exists():
        raise CheckpointError(f"{run} is no run folder", found="no run.json in it")
    body = json.loads(path.read_text(encoding="utf-8"))
    order = body["order"]
    if order["drawn"] or body["data"]["length"] is None:
        raise CheckpointError("the ledger needs an order of the run's own", found="the program's sampler or stream")
    config = body["config"]
    plan = BatchPlan(body["data"]["length"], config["global_batch"], config["micro_batch"], order["drop_last"])
    return ledger(plan, config["seed"], first, stop, order["shuffle"])


def audit(run: Path, delivered: Path) -> tuple[int, list[str]]:
    """Compare what the loaders delivered with what the order says.

    Args:
        run: a run folder.
        delivered: what WORLDSIZE_LEDGER named while it ran.

    Returns:
        how many steps were compared, and a line for each that differs.
    """
    given = deliveries(delivered)
    problems = []
    for step, ids in given.items():
        (_, epoch, expected), *_ = planned(run, step, step + 1)
        if sorted(expected) != ids:
            missing, foreign = sorted(set(expected) - set(ids)), sorted(set(ids) - set(expected))
            problems.append(
                f"step {step}, epoch {epoch}: not delivered {missing[:5]}, delivered instead {foreign[:5]}"
            )
    return len(given), problems
