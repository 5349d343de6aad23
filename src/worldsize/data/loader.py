"""Room: the loader: steps of micro-batches on this rank's device, with the counts of the whole step known beforehand.

It knows a share (rank of ranks) and an agreement; never how the model is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from worldsize.data.feed import Feed, Loaded, MapFeed, Micro, Share, Terms, Workers, alive
from worldsize.data.making import Count, Probe, Seen
from worldsize.data.packed import Packed, small
from worldsize.data.reading import ReadFeed
from worldsize.data.sources import adopt
from worldsize.data.tree import digest, move
from worldsize.errors import DataError
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseeded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from worldsize.data.batch import BatchPlan, Piece
    from worldsize.data.sources import Source
    from worldsize.runtime.comm import Comm, Pending

__all__ = ["Loader", "Micro", "StepBatches"]

Padding = Literal["none", "one", "equal"]


@dataclass(slots=True)
class StepBatches:
    """What one rank needs of a step.

    Attributes:
        piece: the positions of the step in its epoch, over all ranks.
        micro: this rank's micro-batches, on the device.
        totals: over all ranks: "samples", and what `count=` found, by name.
        micro_total: number of micro-batches of the step over all ranks, dummies left out.
    """

    piece: Piece
    micro: list[Micro]
    totals: dict[str, float]
    micro_total: int


@dataclass(slots=True)
class _Begun:
    loaded: Loaded
    sums: Pending | None
    arrived: torch.cuda.Event | None


class Loader:
    """Micro-batches of each step for one rank.

    Which samples a step sees, in which micro-batches, and what each sample and collate draws at random follow from
    the seed, the data and the plan alone: never from ranks, workers, or where training was resumed.

    Args:
        source: a map-style or iterable dataset, a torch DataLoader as it is, or what `worldsize.data` offers.
        plan: how training is cut into steps.
        seed: of order, samples and collate.
        rank: which share of the micro-batches to load; ranks: of how many.
        padding: what a rank with fewer micro-batches receives besides: "none", nothing; "one", a dummy if it would
            have none at all; "equal", dummies until it has as many as the busiest.
        comm: the agreement between all ranks.
        device: where batches are moved; None leaves them on the host.
        count: batch -> number or {name: number}, run where the batch is made; reduced over ranks one step ahead.
        workers: processes that make batches, on each rank; None takes over the DataLoader's, else none.
        pin: batches through page-locked memory; None means for CUDA devices.
        shuffle: False keeps the data's own order.
        dtype_of_floats: floating-point tensors are converted to it on the device.
        counts: whether what this rank counts is added; of ranks that load the same share, one does.
        accept: "own-generator" accepts a dataset that draws from a generator of its own, whose samples then differ
            between layouts and after a resume.

    Raises:
        DataError: the source cannot be served exactly (see `sources.adopt`), or its length is not the plan's.
    """

    def __init__(
        self, source: Any, plan: BatchPlan, *, seed: int, rank: int, ranks: int, padding: Padding, comm: Comm,
        device: torch.device | None = None, count: Count | None = None, workers: int | None = None,
        pin: bool | None = None, shuffle: bool = True, dtype_of_floats: torch.dtype | None = None,
        accept: Collection[str] = (), counts: bool = True,
    ) -> None:  # fmt: skip
        self.plan = plan
        self._source = adopt(source, seed)
        _check_length(self._source, plan)
        self._seed, self._comm, self._count, self._accept = seed, comm, count, accept
        self._device, self._floats, self._counts = device, dtype_of_floats, counts
        self._side = torch.cuda.Stream(device) if _on_cuda(device) else None
        self._names: list[str] | None = None
        self._seen: list[Seen] | None = None
        self._after: dict[str, Any] | None = None
        how = Workers(self._source.workers if workers is None else workers, _pin(pin, self._source, device))
        terms = Terms(plan, seed, Share(rank, ranks, padding), how, count, shuffle)
        self._feed: Feed = (
            ReadFeed(self._source, terms, comm) if self._source.iterable else MapFeed(self._source, terms)
        )

    def steps(self, first: int, stop: int | None) -> Iterator[StepBatches]:
        """The steps first <= step < stop, without end if stop is None. Starts anywhere at once, in any epoch.

        All ranks iterate alike. Only one iteration at a time.

        Raises:
            DataError: the data cannot be served exactly (see the class), or a worker process died.
            Exception: whatever the dataset, collate or count raised, with file and line in a note.
        """
        self._look()
        begun = map(self._begin, self._feed.steps(first, stop))
        ahead = _one_ahead(begun) if self._side is not None or self._reduces else begun
        return alive(map(self._finish, ahead), self.close)

    def fingerprint(self) -> dict[str, Any]:
        """What the data is, in plain values: its length, a sample's types and shapes, a digest over a few samples.

        All ranks call it. The digest is None where samples are not reproducible or not at hand. Raises DataError
        where ranks see different data.
        """
        seen = self._look()
        steady = bool(seen) and all(each.steady for each in seen)
        content = digest([each.content for each in seen]) if steady else None
        found = {"length": self._source.length, "types": seen[0].types if seen else None, "digest": content}
        everyone = self._comm.gather(found)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise DataError(
                    "ranks see different data",
                    found=f"rank 0: {everyone[0]}, rank {rank}: {other}",
                    do="make it alike on every rank: from the same files, or under a fixed seed",
                )
        return found

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on behind the last step given, in plain values; empty where its number is enough.

        All ranks call it. Parts of a stream that have a `state_dict` put their own state in.
        """
        if self._after is None:
            return {}
        spots = {str(lane): spot for each in self._comm.gather(self._after["spots"]) for lane, spot in each.items()}
        return {**self._after, "spots": spots}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, at any number of ranks, before `steps` is called for the step after it."""
        if state:
            spots = {int(lane): spot for lane, spot in state["spots"].items()}
            self._feed.restore({**state, "spots": spots})

    def close(self) -> None:
        """End the workers. The loader is not used afterwards."""
        self._feed.close()

    @property
    def _reduces(self) -> bool:
        return self._count is not None and self._comm.size > 1

    def _look(self) -> list[Seen]:
        """Probe the data once: is a sample decided by its key alone, and does it draw at all?"""
        if self._seen is None:
            indices = self._probed()
            with reseeded(0):
                self._seen = self._feed.looks([Probe(index, twice=turn == 0) for turn, index in enumerate(indices)])
            if "own-generator" not in self._accept:
                _check_steady(indices, self._seen)
            if isinstance(self._feed, MapFeed):
                self._feed.seeded = any(each.draws for each in self._seen)
        return self._seen

    def _probed(self) -> list[int]:
        if self._source.iterable:
            return []
        length = len(self._source.dataset)
        keyed = key(self._seed, "probe") % length
        return list(dict.fromkeys([keyed, 0, length - 1]))

    def _begin(self, loaded: Loaded) -> _Begun:
        """Start what takes time: adding up counts over ranks, and the copy to the device."""
        sums = None
        if self._count is not None:
            mine = _added(self._agreed_names(loaded), loaded)
            sums = self._comm.start_sum(mine if self._counts else [0.0] * len(mine))
        arrived = None
        if self._side is None or all(small(micro.batch) for micro in loaded.micro):
            # A second stream for a copy of microseconds would cost more than the copy.
            self._move(loaded)
        else:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                self._move(loaded)
                arrived = self._side.record_event()
        return _Begun(loaded, sums, arrived)

    def _finish(self, begun: _Begun) -> StepBatches:
        loaded = begun.loaded
        self._after = loaded.after
        totals = {"samples": float(loaded.piece.samples)}
        if begun.sums is not None:
            totals.update(zip(self._names or [], begun.sums.wait(), strict=True))
        if begun.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(begun.arrived)
        return StepBatches(loaded.piece, loaded.micro, totals, loaded.micro_total)

    def _move(self, loaded: Loaded) -> None:
        dummy = None
        for micro in loaded.micro:
            if micro is not dummy:
                micro.batch = self._placed(micro.batch)
            dummy = micro if micro.dummy else None

    def _placed(self, batch: Any) -> Any:
        if isinstance(batch, Packed):
            whole, batch = batch.whole, batch.opened(self._device)
            if whole and self._floats is None:
                return batch
        if self._device is None and self._floats is None:
            return batch
        return move(batch, self._device or torch.device("cpu"), self._floats)

    def _agreed_names(self, loaded: Loaded) -> list[str]:
        """Names of the counts; a rank without a micro-batch in the first step learns them from the others."""
        if self._names is None:
            known = [sorted(micro.count) for micro in loaded.micro if micro.count is not None]
            told = [names for names in self._comm.gather(known[0] if known else None) if names is not None]
            self._names = told[0] if told else None
        return self._names or []


def _one_ahead(begun: Iterator[_Begun]) -> Iterator[_Begun]:
    """The same, each begun one step before it is asked for.

    CAUTION: the copy of a step waits for the work queued before it was begun, one step earlier. That is what lets the
    allocator reuse the memory of a step that is done.
    """
    now = next(begun, None)
    while now is not None:
        coming = next(begun, None)
        yield now
        now = coming


def _added(names: list[str], loaded: Loaded) -> list[float]:
    real = [micro.count or {} for micro in loaded.micro if not micro.dummy]
    for found in real:
        if sorted(found) != names:
            raise DataError(
                f"count= gave other names at step {loaded.piece.step} than before",
                found=f"{sorted(found)}, before {names}",
                do="give the same names for every batch",
            )
    return [sum(found[name] for found in real) for name in names]


def _check_length(source: Source, plan: BatchPlan) -> None:
    if source.length is not None and source.length != plan.length:
        raise DataError("the plan is for other data", found=f"{source.length} samples, planned {plan.length}")


def _check_steady(indices: list[int], seen: list[Seen]) -> None:
    for index, each in zip(indices, seen, strict=True):
        if not each.steady:
            raise DataError(
                f"dataset[{index}] differs under the same key: it draws from its own generator",
                do="draw from torch, numpy.random or random in it, or train anyway, with samples that differ after a "
                "resume: accept='own-generator'",
            )


def _on_cuda(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _pin(asked: bool | None, source: Source, device: torch.device | None) -> bool:
    if asked is None:
        asked = source.pin if source.pin is not None else True
    return asked and _on_cuda(device)
