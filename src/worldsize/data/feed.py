"""Room: what a loader is fed with: one rank's micro-batches of each step, on the host, still to be counted and moved.

`MapFeed` serves datasets with random access. It borrows torch's DataLoader for workers, pinning and prefetch, as one
endless stream of tasks, so that nothing pauses or restarts between epochs.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice, tee
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from worldsize.data.batch import BatchPlan, Piece, deal
from worldsize.data.making import Count, Failed, Made, Maker, Probe, Seen, Task
from worldsize.data.workers import begin, enter
from worldsize.errors import DataError
from worldsize.runtime.keys import key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from worldsize.data.sources import Positions, Source


T = TypeVar("T")
_TOGETHER = 1024 * 1024
"""Bytes that a worker hands over at once, where micro-batches are smaller."""
_MOST_TOGETHER = 8


@dataclass(slots=True)
class Micro:
    """One micro-batch of this rank.

    Attributes:
        index: its number within the step, over all ranks.
        ids: the samples in it; positions in the epoch where samples have no number.
        batch: what collate gave.
        count: what `count=` found in it, by name; None without one.
        dummy: only there so that this rank takes part in the strategy's collectives; counts for nothing.
    """

    index: int
    ids: list[int]
    batch: Any
    count: dict[str, float] | None
    dummy: bool


@dataclass(slots=True)
class Loaded:
    """A step as it comes from the workers."""

    piece: Piece
    micro: list[Micro]
    micro_total: int
    after: Any = None
    """Where the reading stands behind this step, where that must be kept to resume."""


@dataclass(frozen=True, slots=True)
class Share:
    """Whose micro-batches: those of `rank` of `ranks`, and what the others must receive (see `Loader`)."""

    rank: int
    ranks: int
    padding: str

    def of(self, micro_total: int) -> tuple[range, int]:
        """Numbers of this rank's micro-batches in a step that has `micro_total`, and how many dummies follow them."""
        shares = deal(micro_total, self.ranks)
        start, stop = shares[self.rank]
        wanted = {"none": 0, "one": 1, "equal": shares[0][1]}[self.padding]
        return range(start, stop), max(wanted - (stop - start), 0)


@dataclass(frozen=True, slots=True)
class Workers:
    """How micro-batches are made: how many processes, and whether into page-locked memory."""

    count: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """What a feed serves: whose share of which plan, made by which workers (see `Loader`)."""

    plan: BatchPlan
    seed: int
    share: Share
    workers: Workers
    count: Count | None
    shuffle: bool


class Feed(Protocol):
    """What a loader asks of its data."""

    def steps(self, first: int, stop: int | None) -> Iterator[Loaded]:
        """This rank's part of the steps first <= step < stop."""
        ...

    def looks(self, probes: list[Probe]) -> list[Seen]:
        """Look at single samples."""
        ...

    def restore(self, place: Any) -> None:
        """Begin the next iteration at a place that was kept (`Loaded.after`), unless asked for an earlier step."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


@dataclass(slots=True)
class _Tasks:
    """The sampler that torch's DataLoader sees; filled anew before each pass."""

    now: Iterable[tuple[Task | Probe, ...]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Task | Probe, ...]]:
        return iter(self.now)


class MapFeed:
    """Micro-batches of a dataset with random access.

    Args:
        source: the dataset with its collate and worker settings.
        terms: what to serve of it.
    """

    def __init__(self, source: Source, terms: Terms) -> None:
        self._source, self._terms = source, terms
        self._plan, self._share = terms.plan, terms.share
        self.seeded = False
        self._together = 1
        self._order: tuple[int, Positions] | None = None
        self._tasks = _Tasks()
        maker = Maker(source.dataset, source.collate, terms.count, terms.seed)
        self._torch: DataLoader[Any] | None = torch_loader(maker, source, terms.workers, terms.seed, self._tasks)

    def steps(self, first: int, stop: int | None) -> Iterator[Loaded]:
        """See `Feed`."""
        numbers = count(first) if stop is None else range(first, stop)
        pieces, again = tee(map(self._plan.step, numbers))
        work, issued = tee(map(self._work, pieces))
        results = self._run(self._bundles(chain.from_iterable(issued))) if self._has_work() else iter(())
        for piece, tasks in zip(again, work, strict=True):
            micro = [_micro(task, made(next(results))) for task in tasks]
            total = len(self._plan.micro(piece))
            mine, dummies = self._share.of(total)
            yield Loaded(piece, micro[: len(mine)] + micro[len(mine) :] * dummies, total)

    def looks(self, probes: list[Probe]) -> list[Seen]:
        """See `Feed`."""
        found = []
        for result in alive(self._run((probe,) for probe in probes), self.close):
            if isinstance(result, Failed):
                result.throw()
            assert isinstance(result, Seen)
            found.append(result)
        self._together = self._fitting(max(each.size for each in found))
        return found

    def restore(self, place: Any) -> None:
        """Any step is found from its number alone."""

    def close(self) -> None:
        """See `Feed`."""
        self._torch = None

    def _run(self, bundles: Iterable[tuple[Task | Probe, ...]]) -> Iterator[Any]:
        if self._torch is None:
            raise DataError("the loader is closed", do="make a new one")
        self._tasks.now = bundles
        for bundle in received(self._torch):
            yield from bundle.results

    def _bundles(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, ...]]:
        """Tasks as workers get them: the first ones alone, so that all workers begin at once."""
        for task in islice(tasks, 2 * self._terms.workers.count if self._together > 1 else None):
            yield (task,)
        while together := tuple(islice(tasks, self._together)):
            yield together

    def _fitting(self, sample: int) -> int:
        """How many micro-batches travel together: handing one over costs as much as a few hundred kilobytes."""
        if self._terms.workers.count == 0:
            return 1
        return min(max(_TOGETHER // max(sample * self._plan.micro_batch, 1), 1), _MOST_TOGETHER)

    def _has_work(self) -> bool:
        """False where this rank never gets a micro-batch: the first step has as many as any."""
        mine, dummies = self._share.of(len(self._plan.micro(self._plan.step(0))))
        return bool(mine) or dummies > 0

    def _work(self, piece: Piece) -> list[Task]:
        """The rank's micro-batches of a step; one dummy stands for as many as are needed."""
        cuts = self._plan.micro(piece)
        mine, dummies = self._share.of(len(cuts))
        order = self._epoch(piece.epoch)
        tasks = []
        if mine:
            low = cuts[mine.start][0]
            ids = order.ids(low, cuts[mine.stop - 1][1])
            tasks = [self._task(piece, micro, ids[cuts[micro][0] - low : cuts[micro][1] - low]) for micro in mine]
        if dummies:
            tasks.append(self._task(piece, 0, order.ids(*cuts[0]), dummy=True))
        return tasks

    def _task(self, piece: Piece, micro: int, ids: list[int], *, dummy: bool = False) -> Task:
        return Task(piece.step, micro, piece.epoch, ids, self.seeded, dummy)

    def _epoch(self, epoch: int) -> Positions:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._source.order(self._terms.seed, epoch, shuffle=self._terms.shuffle)
        return self._order[1]


def torch_loader(dataset: Any, source: Source, workers: Workers, seed: int, sampler: Any = None) -> DataLoader[Any]:
    """Torch's DataLoader over tasks or over a reader of its own, with the worker settings of the source."""
    several = workers.count > 0
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=workers.count,
        pin_memory=workers.pin,
        timeout=source.timeout if several else 0,
        worker_init_fn=partial(enter, source.worker_init),
        multiprocessing_context=source.context if several else None,
        prefetch_factor=source.prefetch if several else None,
        persistent_workers=several,
        generator=torch.Generator().manual_seed(key(seed, "workers")),
    )


def received(source: DataLoader[Any]) -> Iterator[Any]:
    """What the workers send; a connection that breaks is told like the death of a worker, which it is."""
    results = begin(source)
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            if str(error).startswith("Caught "):
                raise
            raise RuntimeError(f"DataLoader worker broke the connection ({type(error).__name__})") from error
        yield result


def alive(results: Iterator[T], close: Callable[[], None]) -> Iterator[T]:
    """The results, with a plain word where a worker process died.

    CAUTION: torch tells that from a signal handler, so anywhere in the main thread; hence around all of an iteration. It
    tells it again with the end of any other child, until nothing holds the dead worker's iterator any more.
    """
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) and "DataLoader timed out" not in str(error):
                raise
            close()
            _let_go(error)
            raise DataError(
                "a data worker died",
                found=str(error),
                do="look for memory (RAM, /dev/shm) running out, and try fewer workers",
            ) from error
        yield result


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an exception, and of those behind it, still hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def made(result: Any) -> Made:
    """The micro-batch in a worker's answer; raises the user's exception that came instead of it."""
    if isinstance(result, Failed):
        result.throw()
    assert isinstance(result, Made)
    return result


def _micro(task: Task, made: Made) -> Micro:
    return Micro(task.micro, task.ids, made.batch, made.count, task.dummy)


def _as_it_is(value: Any) -> Any:
    return value
