"""Room: several short documents in one row, so that rows are full. Pure arithmetic.

Best-fit decreasing (Johnson, 1974): the longest first, each into the fullest row that still has room: at most 11/9 of the
fewest rows that are possible, and on lengths of texts within a percent of full. The same lengths give the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

from worldsize.errors import DataError


def pack(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put items into as few rows as can be found quickly.

    Args:
        lengths: of the items, each from 1 to `capacity`.
        capacity: of a row.

    Returns:
        the items row by row, and where each row begins among them (one more than there are rows).

    Raises:
        DataError: an item is empty or does not fit.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise DataError(
            "an item does not fit into a row", found=f"lengths {sizes.min()} to {sizes.max()}, rows of {capacity}"
        )
    rows: list[list[int]] = []
    free = _Free(capacity)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        row, room = free.take(size)
        if row is None:
            row = len(rows)
            rows.append([])
        rows[row].append(item)
        free.give(row, room - size)
    # Rows in the order of their first items, so that what was near in the file stays near.
    rows = sorted(sorted(row) for row in rows)
    items = np.array([item for row in rows for item in row], dtype=np.int64)
    return items, np.cumsum([0, *map(len, rows)], dtype=np.int64)


class _Free:
    """Rows by how much room they have."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._bits = 0
        """Bit n is set where a row has room for n."""

    def take(self, size: int) -> tuple[int | None, int]:
        """The fullest row with room for so much, and its room; None: a new one."""
        fitting = self._bits >> size
        if not fitting:
            return None, self._capacity
        room = size + (fitting & -fitting).bit_length() - 1
        row = self._rows[room].pop()
        if not self._rows[room]:
            self._bits &= ~(1 << room)
        return row, room

    def give(self, row: int, room: int) -> None:
        """A row has so much room left."""
        if room:
            self._rows[room].append(row)
            self._bits |= 1 << room
