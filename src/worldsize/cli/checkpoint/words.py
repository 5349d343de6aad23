"""Room: how the checkpoint commands call a layout and a moment."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def layout(found: Mapping[str, Any]) -> str:
    """`fsdp, 4 ranks`: the strategy, its ranks, and the mesh where it has more than one dimension."""
    ranks = found.get("ranks")
    mesh = found.get("mesh") or {}
    shape = " by ".join(f"{name} {size}" for name, size in mesh.items()) if len(mesh) > 1 else ""
    count = "" if ranks is None else "1 rank" if ranks == 1 else f"{ranks} ranks"
    return ", ".join(filter(None, (str(found.get("strategy", "")), count, shape)))


def when(created: str) -> str:
    """A moment of a manifest in this machine's time, to the second."""
    moment = datetime.fromisoformat(created)
    local = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S")
