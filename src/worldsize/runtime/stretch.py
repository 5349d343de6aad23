"""Room: a stretch of a tensor: values that follow one another in it, row by row, as engines cut that lay parameters flat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

Box = tuple[list[int], list[int]]
"""Where a box begins in a tensor, and its shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """What one rank holds of a tensor. It can be read into as a tensor can.

    Attributes:
        values: its own memory, of one dimension; empty where the tensor lies on other ranks only.
        shape: of the whole tensor, of one dimension or more.
        begin: how many of the whole tensor's values come before.
    """

    values: Tensor
    shape: torch.Size
    begin: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    def boxes(self) -> Iterator[tuple[list[int], Tensor]]:
        """The boxes of the tensor that it is made of: where each begins, and its values in their shape."""
        at = 0
        for offsets, sizes in boxes(self.shape, self.begin, self.begin + self.values.numel()):
            count = math.prod(sizes)
            yield offsets, self.values.narrow(0, at, count).view(sizes)
            at += count


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cut a stretch into boxes, in its order: at most two less one for each dimension."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield [begin], [end - begin]
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _inside(shape, last, begin, end)
        return
    yield from _inside(shape, first - 1, begin, first * row)
    if first < last:
        yield [first] + [0] * (len(shape) - 1), [last - first, *shape[1:]]
    yield from _inside(shape, last, last * row, end)


def _inside(shape: Sequence[int], at: int, begin: int, end: int) -> Iterator[Box]:
    """Of one row."""
    start = at * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], begin - start, end - start):
        yield [at, *offsets], [1, *sizes]
