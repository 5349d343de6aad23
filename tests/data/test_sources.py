"""What is taken over from a DataLoader, and what is refused."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.data.samples import Noisy, Numbers, Shards, loader, told
from worldsize import data
from worldsize.data.batch import BatchPlan
from worldsize.data.sources import adopt
from worldsize.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def ids(source: Any, stop: int, first: int = 0, **settings: Any) -> list[int]:
    """Sample ids of some steps of 4 samples."""
    adopted = adopt(source, 1)
    plan = BatchPlan(adopted.length, 4, adopted.micro_batch or 2, adopted.drop_last)
    steps = told(loader(adopted, plan, **settings).steps(first, stop))
    return [number for _, _, _, micro in steps for each in micro for number in each[1]]


def test_a_dataloader_brings_its_settings() -> None:
    """Dataset, collate_fn, batch_size, workers, drop_last, worker_init_fn, prefetch and start method come along."""

    def init(_worker: int) -> None: ...

    given = DataLoader(
        Numbers(9), 2, shuffle=True, num_workers=1, collate_fn=sum, drop_last=True, worker_init_fn=init, timeout=7,
        prefetch_factor=3, multiprocessing_context="spawn",
    )  # fmt: skip
    source = adopt(given)
    assert (source.length, source.micro_batch, source.drop_last, source.workers) == (9, 2, True, 1)
    assert (source.collate, source.worker_init, source.prefetch, source.timeout) == (sum, init, 3, 7)
    assert source.context.get_start_method() == "spawn"
    assert source.shuffle
    assert source.sampler is None


def test_shuffle_means_our_order() -> None:
    """shuffle=True is the same order as for the bare dataset; shuffle=False and `ordered` are the dataset's own."""
    assert ids(DataLoader(Numbers(8), 2, shuffle=True), 2) == ids(Numbers(8), 2) != list(range(8))
    assert ids(DataLoader(Numbers(8), 2), 2) == ids(data.ordered(Numbers(8)), 2) == list(range(8))
    assert ids(Numbers(8), 2, shuffle=False) == list(range(8))


def test_worker_init_runs_in_each_worker() -> None:
    """worker_init_fn is called where the samples are made."""
    dataset = Numbers(4)

    def init(worker: int) -> None:
        setattr(dataset, "extra", worker + 7)  # noqa: B010 - set on the worker's copy only

    def collate(samples: list[torch.Tensor]) -> tuple[int, int]:
        return len(samples), getattr(dataset, "extra", 0)

    given = DataLoader(dataset, 2, num_workers=1, worker_init_fn=init, collate_fn=collate)
    (step,) = loader(given, BatchPlan(4, 4, 2)).steps(0, 1)
    assert [micro.batch for micro in step.micro] == [(2, 7), (2, 7)]


class Odd(Sampler[int]):
    """Draws half of the samples, with the library named."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(0, 16, 2), key=lambda _: self._draw()))


samplers = {
    "torch": Odd(lambda: torch.rand(()).item()),
    "numpy": Odd(lambda: float(np.random.rand())),  # noqa: NPY002
    "random": Odd(random.random),
    "subset": SubsetRandomSampler(range(8)),
    "weighted": WeightedRandomSampler([1.0] * 16, 8),
    "its own torch generator": SubsetRandomSampler(range(8), generator=torch.Generator()),
    "replacement": RandomSampler(Numbers(16), replacement=True, num_samples=8),
}


@pytest.mark.parametrize("name", samplers)
def test_a_sampler_makes_the_order(name: str) -> None:
    """A custom sampler is drawn per epoch under a key: the same again and after a resume, another in the next epoch."""
    given = DataLoader(Numbers(16), 2, sampler=samplers[name])
    whole = ids(given, 4)
    assert len(whole) == 16
    assert whole[:8] != whole[8:]
    assert ids(given, 4, first=1) == whole[4:]


def test_batch_samplers_make_micro_batches() -> None:
    """The batches of a batch sampler become the micro-batches, in its order."""
    given = DataLoader(Numbers(7), batch_sampler=BatchSampler(SequentialSampler(Numbers(7)), 2, drop_last=False))
    source = adopt(given)
    assert (source.length, source.micro_batch) == (7, 2)
    assert ids(given, 2) == list(range(7))


class Own(Sampler[int]):
    """Draws from a generator of numpy of its own."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rng.permutation(16).tolist())


class Growing(Sampler[int]):
    """Has more samples in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """As DistributedSampler has it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 + self.epoch))


refused: dict[str, Callable[[], Any]] = {
    "already split by rank": lambda: DataLoader(
        Numbers(8), 2, sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    ),
    "draws from its own generator": lambda: DataLoader(Numbers(16), 2, sampler=Own()),
    "batches of different sizes": lambda: DataLoader(Numbers(8), batch_sampler=[[0, 1], [2], [3, 4]]),
    "ready batches": lambda: DataLoader(Numbers(8), batch_size=None),
    "is a mapping": lambda: {"x": 1},
    "generator can be read only once": lambda: (number for number in range(3)),
    "neither a dataset nor a DataLoader": lambda: 3,
}


@pytest.mark.parametrize("why", refused)
def test_what_cannot_be_served_is_refused(why: str) -> None:
    """Data that would be served wrongly are refused with the reason."""
    with pytest.raises(DataError, match=why):
        adopt(refused[why]())


def test_a_growing_sampler_is_refused_when_it_grows() -> None:
    """An epoch of another length than the first is an error with both."""
    with pytest.raises(DataError, match="4 samples in epoch 0, 5 in epoch 1"):
        ids(DataLoader(Numbers(16), 2, sampler=Growing()), 3)


def test_an_iterable_has_no_length() -> None:
    """An iterable dataset is served in its own order, its length unknown."""
    source = adopt(DataLoader(Shards(), 2))
    assert (source.length, source.micro_batch, source.iterable, source.shuffle) == (None, 2, True, False)


def test_generated_samples_are_keyed() -> None:
    """`generated` gives fn(index) under the sample's key: the same as a dataset that draws."""
    plan = BatchPlan(12, 4, 2)
    dataset = Noisy(12)
    made = data.generated(dataset.__getitem__, 12)
    assert told(loader(made, plan).steps(0, 4)) == told(loader(dataset, plan).steps(0, 4))
    with pytest.raises(IndexError, match="sample 12 of 12"):
        made[12]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_made_by_epoch(workers: int) -> None:
    """`by_epoch` serves fn(epoch)'s samples in that epoch, made alike in every process, also after a resume."""
    source = data.by_epoch(lambda epoch: [(epoch, random.random()) for _ in range(8)])
    plan = BatchPlan(8, 4, 2)
    steps = [[m.batch for m in step.micro] for step in loader(source, plan, workers=workers).steps(0, 6)]
    assert [batches[0][0].tolist() for batches in steps] == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]
    again = [[m.batch for m in step.micro] for step in loader(source, plan).steps(3, 6)]
    assert str(again) == str(steps[3:])


def test_epochs_of_different_lengths_are_refused() -> None:
    """`by_epoch` says which epoch has how many."""
    source = data.by_epoch(lambda epoch: list(range(8 + epoch)))
    with pytest.raises(DataError, match="8 samples in epoch 0, 9 in epoch 1"):
        list(loader(source, BatchPlan(8, 4, 2)).steps(0, 3))
