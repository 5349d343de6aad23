"""Room: data that can only be read one sample after another. Knows parts, lanes and positions; never ranks.

A step has as many slots as micro-batches. Slots and parts are dealt to lanes, in the same way at any
number of ranks: a lane reads its parts one after another and fills its slots in turn. So what a step sees does not
depend on who reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypedDict

from torch.utils.data import IterableDataset

from worldsize.data.making import Count, Failed, Made, numbers
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed

Make = Callable[[int, int], Iterable[Any]]


class Spot(TypedDict):
    """Where a lane stands: the part, how many of its samples are read, and its own state where it keeps one."""

    part: int
    read: int
    state: Any


class Place(TypedDict):
    """Before which step the reading stands: the step, its epoch, steps and samples done in it, every lane."""

    step: int
    epoch: int
    nth: int
    start: int
    spots: dict[int, Spot]


@dataclass(frozen=True, slots=True)
class Lane:
    """Parts that are read one after another, and the slots (number, samples) that they fill in every step."""

    number: int
    parts: range
    slots: tuple[tuple[int, int], ...]


def lanes_of(parts: int, slots: list[int]) -> list[Lane]:
    """Deal `parts` and slots of the given sizes to as many lanes as both allow, each contiguous."""
    many = min(parts, len(slots))
    owner = [slot * many // len(slots) for slot in range(len(slots))]
    bounds = [-(-lane * parts // many) for lane in range(many + 1)]
    return [
        Lane(lane, range(*bounds[lane : lane + 2]), tuple((s, slots[s]) for s, at in enumerate(owner) if at == lane))
        for lane in range(many)
    ]


@dataclass(slots=True)
class Record:
    """What some lanes gave to one step.

    Attributes:
        epoch: of the samples.
        sizes: samples in each slot that got any.
        made: micro-batches of the slots that were wanted.
        spots: where each lane stands behind it.
        failed: the user's exception, which ends the reading.
    """

    epoch: int
    sizes: dict[int, int] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    spots: dict[int, Spot] = field(default_factory=dict)
    failed: Failed | None = None

    def pin_memory(self) -> Record:
        """The same in page-locked memory (torch's pinning thread calls this)."""
        made = {slot: each.pin_memory() for slot, each in self.made.items()}
        return Record(self.epoch, self.sizes, made, self.spots, self.failed)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How samples are got and batched: `make(part, parts)`, and see `making.Maker`."""

    make: Make
    parts: int
    collate: Callable[[list[Any]], Any]
    count: Count | None
    seed: int


class LaneReader(IterableDataset[Record]):
    """Records of some lanes, step by step and epoch after epoch without end; the last record of an epoch is empty.

    Args:
        recipe: how samples are got and batched.
        lanes: which lanes to read.
        wanted: slots to make batches for; the samples of others are read past.
        place: where to begin; lanes without a spot in it begin their epoch.
    """

    def __init__(self, recipe: Recipe, lanes: list[Lane], wanted: frozenset[int], place: Place) -> None:
        self._recipe, self._lanes, self._wanted, self._place = recipe, lanes, wanted, place

    def __iter__(self) -> Iterator[Record]:
        spots, nth = self._place["spots"], self._place["nth"]
        for epoch in count(self._place["epoch"]):
            readers = [_Reading(self._recipe, lane, epoch, spots.get(lane.number)) for lane in self._lanes]
            full = True
            while full:
                record = self._record(readers, epoch, nth)
                yield record
                if record.failed is not None:
                    return
                full, nth = bool(record.sizes), nth + 1
            spots, nth = {}, 0

    def _record(self, readers: list[_Reading], epoch: int, nth: int) -> Record:
        record = Record(epoch)
        try:
            for reader in readers:
                self._fill(record, reader, nth)
        except Exception as error:  # noqa: BLE001 - it is raised again in the main process
            record.failed = Failed.of(error, f"epoch {epoch}, batch {nth} of it")
        return record

    def _fill(self, record: Record, reader: _Reading, nth: int) -> None:
        recipe = self._recipe
        for slot, size in reader.lane.slots:
            samples = list(islice(reader.samples, size))
            if not samples:
                break
            record.sizes[slot] = len(samples)
            if slot in self._wanted:
                reseed(key(recipe.seed, "collate", record.epoch, nth, slot))
                batch = recipe.collate(samples)
                record.made[slot] = Made(batch, None if recipe.count is None else numbers(recipe.count(batch)))
        record.spots[reader.lane.number] = reader.spot()


class _Reading:
    """One lane in one epoch."""

    def __init__(self, recipe: Recipe, lane: Lane, epoch: int, spot: Spot | None) -> None:
        self.lane = lane
        self._recipe, self._epoch = recipe, epoch
        self._spot = spot or Spot(part=lane.parts.start, read=0, state=None)
        self._part: Any = None
        self.samples = self._read()

    def spot(self) -> Spot:
        """Where it stands, as plain values and whatever the part's `state_dict` gives."""
        state = self._part.state_dict() if callable(getattr(self._part, "state_dict", None)) else None
        return Spot(part=self._spot["part"], read=self._spot["read"], state=state)

    def _read(self) -> Iterator[Any]:
        for part in range(self._spot["part"], self.lane.parts.stop):
            items = self._opened(part)
            while True:
                reseed(key(self._recipe.seed, "sample", self._epoch, part, self._spot["read"]))
                try:
                    sample = next(items)
                except StopIteration:
                    break
                self._spot["read"] += 1
                yield sample
            self._part = None
            self._spot = Spot(part=part + 1, read=0, state=None)

    def _opened(self, part: int) -> Iterator[Any]:
        """The part's samples from the spot on: by its own state, or read again up to there."""
        recipe, state = self._recipe, self._spot["state"]
        reseed(key(recipe.seed, "order", self._epoch, part))
        self._part = recipe.make(part, recipe.parts)
        if callable(getattr(self._part, "set_epoch", None)):
            self._part.set_epoch(self._epoch)
        if state is not None:
            self._part.load_state_dict(state)
        items: Iterator[Any] = iter(self._part)
        if state is not None:
            return items
        for read in range(self._spot["read"]):
            reseed(key(recipe.seed, "sample", self._epoch, part, read))
            next(items, None)
        return items
