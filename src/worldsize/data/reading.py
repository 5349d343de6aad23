"""Room: the feed of a loader whose data can only be read one sample after another, agreed between ranks.

How many samples a step has is known only after reading, so each step's sizes are agreed one step ahead: no rank waits
for a step that others do not have, and the last step of an epoch is known as such.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.data.batch import Piece, deal
from worldsize.data.feed import Loaded, Micro, Terms, Workers, received, torch_loader
from worldsize.data.kinds import Stream
from worldsize.data.lanes import Lane, LaneReader, Place, Recipe, Record, Spot, lanes_of
from worldsize.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.data.making import Made, Probe, Seen
    from worldsize.data.sources import Source
    from worldsize.runtime.comm import Comm

_log = logging.getLogger(__name__)
_READER = 0
"""The rank that reads a dataset which cannot be read in parts."""


@dataclass(slots=True)
class _Step:
    """What all lanes gave to a step: sizes over all ranks, micro-batches and spots of the lanes read here."""

    sizes: dict[int, int]
    made: dict[int, Made]
    spots: dict[int, Spot]

    @property
    def samples(self) -> int:
        return sum(self.sizes.values())


class ReadFeed:
    """Micro-batches of an iterable dataset, read on the first rank and dealt, or of a stream of parts.

    Args:
        source: the dataset with its collate and worker settings.
        terms: what to serve of it.
        comm: agrees on sizes, and carries the batches of a dataset that is read on one rank.
    """

    def __init__(self, source: Source, terms: Terms, comm: Comm) -> None:
        stream = source.dataset if isinstance(source.dataset, Stream) else None
        make = stream.make if stream else _Whole(source.dataset)
        self._recipe = Recipe(make, stream.parts if stream else 1, source.collate, terms.count, terms.seed)
        self._source, self._comm = source, comm
        self._plan, self._share, self._workers = terms.plan, terms.share, terms.workers
        whole = Piece(0, 0, 0, terms.plan.global_batch, ends_epoch=False)
        sizes = [stop - start for start, stop in terms.plan.micro(whole)]
        self._slots = deal(len(sizes), terms.share.ranks)
        self._dealt = stream is None
        self._lanes, self._wanted = self._to_read(lanes_of(self._recipe.parts, sizes), len(sizes))
        self._place: Place = _beginning()

    def steps(self, first: int, stop: int | None) -> Iterator[Loaded]:
        """See `Feed`."""
        place = self._place if self._place["step"] <= first else _beginning()
        if place["step"] < first:
            _log.warning("reading steps %d to %d again to come to step %d", place["step"], first - 1, first)
        records = self._open(place)
        now = self._next(records, place["epoch"])
        while stop is None or place["step"] < stop:
            self._refuse_empty(now, place)
            coming = self._next(records, place["epoch"])
            ends = self._is_short(coming)
            piece = Piece(place["step"], place["epoch"], place["start"], place["start"] + now.samples, ends)
            place = _after(piece, place["nth"] + 1, now.spots)
            if piece.step >= first:
                yield Loaded(piece, self._micro(now, piece), len(now.sizes), place)
            now = self._next(records, place["epoch"]) if ends else coming

    def looks(self, probes: list[Probe]) -> list[Seen]:
        """Nothing can be looked at without reading."""
        assert not probes
        return []

    def restore(self, place: Place) -> None:
        """Begin the next iteration at a place that was kept, if it is not behind the step asked for."""
        self._place = place

    def close(self) -> None:
        """Workers end with their iteration."""

    def _to_read(self, lanes: list[Lane], slots: int) -> tuple[list[Lane], frozenset[int]]:
        """The lanes to read here and the slots to make."""
        if self._dealt:
            return (lanes if self._comm.rank == _READER else []), frozenset(range(slots))
        mine = frozenset(range(*self._slots[self._share.rank]))
        return [lane for lane in lanes if mine & {slot for slot, _ in lane.slots}], mine

    def _open(self, place: Place) -> list[_Peekable]:
        """One reader for each worker, or one here; the lanes are divided between them."""
        groups = max(min(self._workers.count, len(self._lanes)), 1)
        how = Workers(min(self._workers.count, 1), self._workers.pin)
        opened = []
        for group in range(groups):
            lanes = self._lanes[group::groups]
            reader = LaneReader(self._recipe, lanes, self._wanted, place)
            results = received(torch_loader(reader, self._source, how, self._recipe.seed)) if lanes else iter(())
            opened.append(_Peekable(self._shared(results) if self._dealt else results))
        return opened

    def _shared(self, results: Iterator[Record]) -> Iterator[Record]:
        """The first rank's records, on every rank."""
        while True:
            yield self._comm.broadcast(next(results, None), _READER)  # type: ignore[misc]

    def _next(self, records: list[_Peekable], epoch: int) -> _Step:
        found = [record for each in records if (record := each.take(epoch)) is not None]
        local = {slot: size for record in found for slot, size in record.sizes.items()}
        failed = next((record.failed for record in found if record.failed is not None), None)
        sizes = {}
        for part, failure in self._comm.gather((local, failed)):
            if failure is not None:
                failure.throw()
            sizes.update(part)
        made = {slot: each for record in found for slot, each in record.made.items()}
        spots = {lane: spot for each in records for lane, spot in each.spots.items()}
        return _Step(dict(sorted(sizes.items())), made, spots)

    def _micro(self, step: _Step, piece: Piece) -> list[Micro]:
        names = {slot: number for number, slot in enumerate(step.sizes)}
        starts = dict(zip(step.sizes, _running(step.sizes.values(), piece.start), strict=True))
        filled = [[slot for slot in range(*slots) if slot in step.sizes] for slots in self._slots]
        mine = filled[self._share.rank]
        real = [self._one(names[slot], starts[slot], step.sizes[slot], step.made[slot]) for slot in mine]
        wanted = {"none": 0, "one": 1, "equal": max(map(len, filled))}[self._share.padding]
        if not all(len(slots) >= min(wanted, 1) for slots in filled):
            self._lend(step)
        spare = next(iter(step.made.values())) if wanted > len(mine) else None
        dummies = [Micro(0, [piece.start], spare.batch, None, dummy=True)] if spare else []
        return real + dummies * (wanted - len(mine))

    def _lend(self, step: _Step) -> None:
        """Some rank has nothing in this step: whoever made its first micro-batch gives it to all, for a dummy."""
        first = next(iter(step.sizes))
        if not self._dealt:
            lent = [made for made in self._comm.gather(step.made.get(first)) if made is not None]
            step.made.setdefault(first, lent[0])

    @staticmethod
    def _one(name: int, start: int, size: int, made: Made) -> Micro:
        return Micro(name, list(range(start, start + size)), made.batch, made.count, dummy=False)

    def _is_short(self, step: _Step) -> bool:
        """Not a step any more: nothing is left of the epoch, or too little under drop_last."""
        return step.samples == 0 or (self._plan.drop_last and step.samples < self._plan.global_batch)

    def _refuse_empty(self, step: _Step, place: Place) -> None:
        if place["start"] == 0 and self._is_short(step):
            raise DataError(
                f"epoch {place['epoch']} of the data has no step",
                found=f"{step.samples} samples, global_batch {self._plan.global_batch}",
                do="check the path and the filters of the data",
            )


class _Whole:
    """A dataset as its own single part."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, _part: int, _parts: int) -> Any:
        return self._dataset


class _Peekable:
    """Records, each taken only in its own epoch; remembers where the lanes stand behind the last one taken."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._held: Record | None = None
        self.spots: dict[int, Spot] = {}

    def take(self, epoch: int) -> Record | None:
        """The next record if it is of this epoch, else None: the lanes are at its end."""
        while self._held is None or self._held.epoch < epoch:
            self._held = next(self._records, None)
            if self._held is None:
                return None
        record = self._held
        if record.epoch > epoch:
            return None
        self._held, self.spots = None, record.spots
        return record


def _beginning() -> Place:
    return Place(step=0, epoch=0, nth=0, start=0, spots={})


def _after(piece: Piece, nth: int, spots: dict[int, Spot]) -> Place:
    if piece.ends_epoch:
        return Place(step=piece.step + 1, epoch=piece.epoch + 1, nth=0, start=0, spots={})
    return Place(step=piece.step + 1, epoch=piece.epoch, nth=nth, start=piece.stop, spots=spots)


def _running(sizes: Any, start: int) -> Iterator[int]:
    for size in sizes:
        yield start
        start += size
