"""Room: what can be trained on. Turns a dataset or a torch DataLoader into one value, `Source`; never steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from worldsize.data.order import Order
from worldsize.errors import DataError
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseeded


class Positions(Protocol):
    """The order of one epoch."""

    def __len__(self) -> int: ...

    def ids(self, start: int, stop: int) -> list[int]:
        """The samples at positions start <= p < stop."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset with all that a DataLoader would add to it."""

    dataset: Any
    length: int | None
    """Samples in an epoch; None where that is known only after reading."""
    micro_batch: int | None = None
    """The batch size that a DataLoader brought, or None."""
    drop_last: bool = False
    shuffle: bool = True
    sampler: Any = None
    """A sampler or batch sampler of the user, which makes the order; None for ours."""
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    pin: bool | None = None
    worker_init: Callable[[int], None] | None = None
    prefetch: int | None = None
    context: Any = None
    timeout: float = 0

    @property
    def iterable(self) -> bool:
        """Samples can only be read one after another."""
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    def order(self, seed: int, epoch: int, *, shuffle: bool = True) -> Positions:
        """The order of an epoch. Raises DataError where a sampler's epoch has another length than the first one."""
        assert self.length is not None
        if self.sampler is None:
            return Order(seed, epoch, self.length, shuffle and self.shuffle)
        drawn = _draw(self.sampler, self.micro_batch, seed, epoch)
        if len(drawn) != self.length:
            raise DataError(
                f"{type(self.sampler).__name__} gives epochs of different lengths",
                found=f"{self.length} samples in epoch 0, {len(drawn)} in epoch {epoch}",
                do="draw the same number in every epoch",
            )
        return Drawn(drawn)


class Drawn:
    """An order that a sampler gave: a stored list."""

    def __init__(self, indices: list[int]) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def ids(self, start: int, stop: int) -> list[int]:
        """The samples at positions start <= p < stop."""
        return self._indices[start:stop]


def adopt(data: Any, seed: int = 0) -> Source:
    """A map-style or iterable dataset, a DataLoader, or a Source, as a Source.

    Raises:
        DataError: the data is already split by rank, is a mapping or a generator, has no length, or its batches have
            no fixed size.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, DataLoader):
        return _from_loader(data, seed)
    if isinstance(data, Mapping):
        raise DataError("the data is a mapping", found=type(data).__name__, do="give its values as a dataset")
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return _from_iterable(data)
    if not hasattr(data, "__len__"):
        raise DataError(f"{type(data).__name__} has no length", do="give it __len__, or make it an IterableDataset")
    return Source(data, len(data))


def _from_iterable(data: Any) -> Source:
    if not isinstance(data, Iterable):
        raise DataError("the data is neither a dataset nor a DataLoader", found=type(data).__name__)
    if not isinstance(data, IterableDataset) and iter(data) is data:
        raise DataError(
            "a generator can be read only once, so not resumed",
            found=type(data).__name__,
            do="pass an IterableDataset, or ws.data.stream(make, parts=1)",
        )
    return Source(data, None, shuffle=False)


def _from_loader(loader: DataLoader[Any], seed: int) -> Source:
    batches = loader.batch_sampler
    if batches is None:
        raise DataError(
            "DataLoader(batch_size=None) gives ready batches, so samples cannot be counted", do="set batch_size"
        )
    size = loader.batch_size if loader.batch_size is not None else getattr(batches, "batch_size", None)
    base = replace(
        adopt(loader.dataset, seed),
        micro_batch=size,
        drop_last=bool(loader.drop_last),
        collate=loader.collate_fn,
        workers=loader.num_workers,
        pin=loader.pin_memory or None,
        worker_init=loader.worker_init_fn,
        prefetch=loader.prefetch_factor,
        context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    return base if base.iterable else _with_sampler(base, loader, seed)


def _with_sampler(base: Source, loader: DataLoader[Any], seed: int) -> Source:
    own_batches = loader.batch_size is None
    sampler: Any = loader.batch_sampler if own_batches else loader.sampler
    for part in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(part, DistributedSampler) or getattr(part, "num_replicas", 1) > 1:
            raise DataError(
                "the DataLoader's data is already split by rank",
                found=type(part).__name__,
                do="pass the undivided one: DataLoader(dataset, batch_size=…, shuffle=True)",
            )
    if not own_batches and type(sampler) is SequentialSampler:
        return replace(base, shuffle=False)
    if not own_batches and type(sampler) is RandomSampler and _plain(sampler, base):
        return base
    return _drawn_source(replace(base, sampler=sampler), seed)


def _plain(sampler: RandomSampler, base: Source) -> bool:
    """Each sample once: then our order stands for it."""
    return not sampler.replacement and sampler.num_samples == base.length


def _drawn_source(base: Source, seed: int) -> Source:
    first, again = (_draw(base.sampler, base.micro_batch, seed, 0) for _ in range(2))
    if first != again:
        raise DataError(
            f"{type(base.sampler).__name__} gives another order under the same key: it draws from its own generator",
            do="let it draw from torch, numpy or random, or from an attribute `generator` that is a torch.Generator",
        )
    if base.micro_batch is None:
        base = replace(base, micro_batch=len(next(iter(base.sampler))))
    return replace(base, length=len(first))


def _draw(sampler: Any, size: int | None, seed: int, epoch: int) -> list[int]:
    """The indices of an epoch, in order; batches are joined, and must all (but the last) have one size."""
    number = key(seed, "order", epoch)
    parts: tuple[Any, Any] = (sampler, getattr(sampler, "sampler", None))
    for part in parts:
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(number)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
    with reseeded(number):
        found = list(sampler)
    if found and isinstance(found[0], Iterable):
        return _joined([[int(index) for index in batch] for batch in found], size, sampler)
    return [int(index) for index in found]


def _joined(batches: list[list[int]], size: int | None, sampler: Any) -> list[int]:
    sizes = {len(batch) for batch in batches[:-1]} or {len(batches[-1])}
    expected = size if size is not None else max(sizes)
    if sizes != {expected} or len(batches[-1]) > expected:
        raise DataError(
            f"{type(sampler).__name__} gives batches of different sizes, which cannot be micro-batches",
            found=f"{min(sizes)} to {max(sizes)} samples",
            do="give all but the last the same size, or pass a sampler and batch_size",
        )
    return [index for batch in batches for index in batch]
