"""Room: the order of an epoch. Knows three integers (seed, epoch, length); never files or ranks.

The order is a keyed permutation that is computed, not stored: the sample at any position costs the same at once,
whether the epoch has ten samples or 10**12. Short epochs sort keyed hashes; long ones run a Feistel network over the
smallest rectangle that holds the length, walking cycles until the result lies inside (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from worldsize.runtime.keys import key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.uint64]

_LONGEST = 2**62
_SORTED = 1024
_ROUNDS = 8
_AHEAD = 1024
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03))
_HALF = np.uint64(32)


class Order:
    """Which sample stands at which position of one epoch: a permutation of `range(length)`.

    Args:
        seed: the seed of the run.
        epoch: each epoch has its own permutation.
        length: samples in the epoch, up to 2**62.
        shuffle: False gives the identity.

    Memory is bounded by a constant. Equal arguments give equal orders in every process.
    """

    def __init__(self, seed: int, epoch: int, length: int, shuffle: bool = True) -> None:
        if not 0 <= length <= _LONGEST:
            raise ValueError(f"an order has between 0 and 2**62 samples, not {length}")
        self._length, self._shuffle = length, shuffle
        self._keys = [np.uint64(key(seed, "order", epoch, turn)) for turn in range(_ROUNDS)]
        self._rows = isqrt(max(length - 1, 0)) + 1
        self._columns = -(-length // self._rows)
        self._table = self._sorted() if shuffle and length <= _SORTED else None
        self._low, self._window = 0, np.empty(0, np.uint64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        """The sample at `position`, 0 <= position < length. Raises IndexError outside."""
        self._check(position, position + 1)
        return int(self._compute(position, position + 1)[0])

    def ids(self, start: int, stop: int) -> list[int]:
        """The samples at positions start <= p < stop. Raises IndexError outside 0 … length."""
        self._check(start, stop)
        if not self._low <= start <= stop <= self._low + len(self._window):
            self._low = start
            self._window = self._compute(start, max(stop, min(start + _AHEAD, self._length)))
        found: list[int] = self._window[start - self._low : stop - self._low].tolist()
        return found

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"positions {start} to {stop} of an epoch of {self._length} samples")

    def _compute(self, start: int, stop: int) -> Vector:
        positions = np.arange(start, stop, dtype=np.uint64)
        if not self._shuffle:
            return positions
        if self._table is not None:
            return self._table[start:stop]
        found = self._permute(positions)
        while (outside := np.flatnonzero(found >= np.uint64(self._length))).size:
            found[outside] = self._permute(found[outside])
        return found

    def _sorted(self) -> Vector:
        """The whole order of a short epoch: positions sorted by their hashes."""
        hashes = _hash(_hash(np.arange(self._length, dtype=np.uint64), self._keys[0]), self._keys[1])
        return np.argsort(hashes, kind="stable").astype(np.uint64)

    def _permute(self, values: Vector) -> Vector:
        """One pass over the rectangle of rows by columns: each turn shifts one coordinate by a hash of the other."""
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = np.divmod(values, columns)
        for one, other in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = _shift(row, _hash(column, one), rows)
            column = _shift(column, _hash(row, other), columns)
        return row * columns + column


def _hash(values: Vector, number: np.uint64) -> Vector:
    values = (values + number) * _ODD[0]
    values ^= values >> _HALF
    values *= _ODD[1]
    values ^= values >> _HALF
    return values


def _shift(values: Vector, hashes: Vector, size: np.uint64) -> Vector:
    """(values + a number below size, taken from the hashes' high half) modulo size, without a division."""
    moved = values + ((hashes >> _HALF) * size >> _HALF)
    return np.where(moved >= size, moved - size, moved)
