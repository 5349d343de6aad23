"""Room: what a run's ranks held in memory, from its folder: a rank that was killed can say nothing. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from pathlib import Path


def by(folder: Path) -> str | None:
    """Batch, a sample's shapes, layout, and what to lower if memory was the reason; None where the run has not begun."""
    try:
        run = json.loads((folder / "run.json").read_bytes())
        began = [row for row in read(folder / "events.jsonl") if row["event"] in ("start", "resume")][-1]
        batch, layout = run["config"], began["layout"]
        sample = (run["data"] or {}).get("types")
        return (
            f"if it was memory: it held micro_batch {batch['micro_batch']} of global_batch {batch['global_batch']}"
            f"{f', samples {sample}' if sample else ''}, {layout['strategy']} on {layout['ranks']} rank(s): "
            f"lower the micro-batch, the length or the number of data workers, or have fewer ranks on each node"
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
