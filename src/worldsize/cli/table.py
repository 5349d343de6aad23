"""Room: columns of text for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
