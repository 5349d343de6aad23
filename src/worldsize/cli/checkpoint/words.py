"""Room: how the checkpoint commands call a layout, a size and a moment."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_STEP = 1000.0


def layout(found: Mapping[str, Any]) -> str:
    """`fsdp, 4 ranks`: the strategy, its ranks, and the mesh where it has more than one dimension."""
    ranks = found.get("ranks")
    mesh = found.get("mesh") or {}
    shape = " by ".join(f"{name} {size}" for name, size in mesh.items()) if len(mesh) > 1 else ""
    count = "" if ranks is None else "1 rank" if ranks == 1 else f"{ranks} ranks"
    return ", ".join(filter(None, (str(found.get("strategy", "")), count, shape)))


def size(count: float) -> str:
    """`3.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < _STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return f"{count:.1f} TB"


def when(created: str) -> str:
    """A moment of a manifest in this machine's time, to the second."""
    moment = datetime.fromisoformat(created)
    local = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S")


def table(rows: Sequence[Sequence[str]], right: str) -> Iterator[str]:
    """Lines of columns with two blanks between them.

    Args:
        rows: of equal length.
        right: a letter a column: `r` where it is set to the right, `l` to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, right, strict=True)
        )
        yield "  ".join(cells).rstrip()
