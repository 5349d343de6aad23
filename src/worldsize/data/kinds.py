"""Room: datasets that are made rather than stored. Knows functions of an index or of an epoch; never ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from worldsize.data.sources import Source, adopt
from worldsize.errors import DataError
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Generated:
    """A map-style dataset of `length` samples, each made by `fn(index)` under the key of its epoch and index."""

    def __init__(self, fn: Callable[[int], Any], length: int) -> None:
        self._fn, self._length = fn, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """The sample."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return self._fn(index)


class ByEpoch:
    """A dataset that `fn(epoch)` makes anew for every epoch, in each process that reads it.

    All epochs must have as many samples as epoch 0 (DataError otherwise). `fn` runs under a key of the epoch, so that
    what it draws from torch, numpy or random is equal everywhere.
    """

    def __init__(self, fn: Callable[[int], Any]) -> None:
        self._fn = fn
        self._now: tuple[int, Any] | None = None
        self._length = len(self.at(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """A sample of epoch 0."""
        return self.at(0)[index]

    def at(self, epoch: int) -> Any:
        """The dataset of `epoch`. The last one is kept."""
        if self._now is None or self._now[0] != epoch:
            self._now = None
            with reseeded(key(0, "by_epoch", epoch)):
                self._now = epoch, self._fn(epoch)
            self._check(epoch, len(self._now[1]))
        return self._now[1]

    def _check(self, epoch: int, found: int) -> None:
        if epoch and found != self._length:
            raise DataError(
                "the datasets of different epochs have different lengths",
                found=f"{self._length} samples in epoch 0, {found} in epoch {epoch}",
                do="give every epoch the same number of samples",
            )


class Stream(IterableDataset[Any]):
    """Data in `parts` that can be read side by side; see `stream`."""

    def __init__(self, make: Callable[[int, int], Iterable[Any]], parts: int) -> None:
        if parts < 1:
            raise DataError("a stream needs at least one part", found=f"parts={parts}")
        self.make, self.parts = make, parts

    def __iter__(self) -> Iterator[Any]:
        for part in range(self.parts):
            yield from self.make(part, self.parts)


def generated(fn: Callable[[int], Any], length: int) -> Generated:
    """Samples made on demand: `fn(index)` for 0 <= index < length, which may draw from torch, numpy or random."""
    return Generated(fn, length)


def by_epoch(fn: Callable[[int], Any]) -> ByEpoch:
    """A dataset made anew for each epoch: `fn(epoch)` gives a map-style dataset, always of the same length."""
    return ByEpoch(fn)


def stream(make: Callable[[int, int], Iterable[Any]], parts: int = 64) -> Stream:
    """Data read one sample after another in parts: `make(part, parts)` gives those of one part, each epoch anew.

    Parts are dealt to the micro-batches of a step, whoever reads them, so ranks up to `parts` share the reading. What
    `make` and its iterator draw from torch, numpy or random is keyed by epoch, part and position. A part with
    `state_dict` and `load_state_dict` resumes at once; others are read again up to where they stood.
    """
    return Stream(make, parts)


def ordered(data: Any) -> Source:
    """The data in its own order, not shuffled: a map-style dataset or a DataLoader."""
    return replace(adopt(data), shuffle=False)
