"""Room: how one micro-batch is made, in a worker process or here. Knows the dataset, collate and keys; never ranks.

Before each sample the generators of torch, numpy and random are seeded by its key, so that a sample is the same on
any rank, in any worker, before and after a resume. Seeding costs about 10 µs; a dataset that draws nothing does not
pay that for each sample: whether it drew is seen after each micro-batch, which is then made anew with seeds.
"""

from __future__ import annotations

import math
import pickle
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from worldsize.data.kinds import ByEpoch
from worldsize.data.packed import packed, plain
from worldsize.data.tree import digest, outline, pinned, size
from worldsize.errors import DataError
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed

Count = Callable[[Any], Any]
"""A batch to a number, or to numbers by name."""

_QUIET = 0x5EED
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What numpy knows too, by bytes: it knows no bfloat16."""


@dataclass(frozen=True, slots=True)
class Task:
    """One micro-batch to make: number `micro` of step `step`, of these samples of `epoch`."""

    step: int
    micro: int
    epoch: int
    ids: list[int]
    seeded: bool
    """The dataset is known to draw: seed every sample at once."""
    dummy: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """One sample to look at instead; `twice` also asks whether its key alone decides it."""

    index: int
    twice: bool


@dataclass(slots=True)
class Made:
    """A micro-batch: what collate gave, and what `count` found in it (None without one)."""

    batch: Any
    count: dict[str, float] | None

    def __reduce__(self) -> tuple[Any, ...]:
        return Made, (packed(self.batch), self.count)

    def pin_memory(self) -> Made:
        """The same in page-locked memory (torch's pinning thread calls this)."""
        return Made(pinned(packed(self.batch, pin=True)), self.count)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a probe found: content, bytes, types and shapes; whether one key gives one sample, and another key another."""

    content: str
    size: int
    types: str
    steady: bool
    draws: bool


@dataclass(slots=True)
class Failed:
    """An exception of the user's dataset, collate or count, on its way to the main process."""

    error: BaseException
    told: str | None
    """The traceback as text, where the exception came from another process."""
    where: str

    @classmethod
    def of(cls, error: Exception, what: str) -> Failed:
        """Keep `error` with the place that raised it; `what` says what was being made."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}, {what}"
        return cls(error, None, where)

    def __reduce__(self) -> tuple[Any, ...]:
        told = self.told or "".join(traceback.format_exception(self.error))
        return Failed, (_portable(self.error, self.where), told, self.where)

    def throw(self) -> None:
        """Raise it: the same type and message, with file and line in a note."""
        error = self.error
        if isinstance(error, RuntimeError) and "re-initialize CUDA" in str(error):
            raise DataError(
                "the dataset or collate_fn used CUDA in a worker process",
                found=self.where,
                do="dataset/collate must return CPU tensors; the loader moves them to the device",
            ) from error
        if isinstance(error, StopIteration):
            raise DataError("the dataset raised StopIteration", found=self.where, do="raise IndexError") from error
        error.add_note(f"raised at {self.where}")
        if self.told is not None:
            error.__cause__ = _InWorkerError(self.told)
        raise error


class _InWorkerError(Exception):
    """The traceback of a worker process, shown above the exception that it caused."""

    def __str__(self) -> str:
        return f"in a worker process\n{self.args[0]}"


@dataclass(slots=True)
class Bundle:
    """Answers to tasks that were given together, in their order."""

    results: list[Made | Seen | Failed]

    def pin_memory(self) -> Bundle:
        """The same in page-locked memory (torch's pinning thread calls this)."""
        return Bundle([each.pin_memory() if isinstance(each, Made) else each for each in self.results])


class Maker:
    """A map-style dataset of tuples of tasks, for torch's DataLoader to run in its workers.

    Args:
        dataset: what `dataset[index]`, or `dataset.__getitems__(indices)`, is asked of.
        collate: samples to a batch.
        count: a batch to a number or to numbers by name, or None.
        seed: the seed of the run.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], count: Count | None, seed: int) -> None:
        self._dataset, self._collate, self._count, self._seed = dataset, collate, count, seed
        self._draws = False

    def __getitem__(self, tasks: tuple[Task | Probe, ...]) -> Bundle:
        """Make what the tasks ask for. The user's exceptions come back as values."""
        return Bundle([self._answer(task) for task in tasks])

    def _answer(self, task: Task | Probe) -> Made | Seen | Failed:
        try:
            return self._look(task) if isinstance(task, Probe) else self._make(task)
        except Exception as error:  # noqa: BLE001 - it is raised again in the main process
            return Failed.of(error, self._what(task))

    def _make(self, task: Task) -> Made:
        dataset, ids = _peeled(self._epoch(task.epoch), task.ids)
        if type(dataset) is TensorDataset and self._collate is default_collate:
            batch: Any = [_rows(tensor, ids) for tensor in dataset.tensors]
        else:
            samples = self._samples(dataset, ids, task)
            if self._collate is not default_collate:
                reseed(key(self._seed, "collate", task.step, task.micro))
            batch = self._collate(samples)
        return Made(batch, None if self._count is None else numbers(self._count(batch)))

    def _samples(self, dataset: Any, ids: list[Any], task: Task) -> list[Any]:
        if callable(getattr(dataset, "__getitems__", None)):
            return _many(dataset, ids, self._key(task.epoch, task.ids[0]))
        if not (task.seeded or self._draws):
            reseed(_QUIET)
            samples = [dataset[index] for index in ids]
            if _untouched():
                return samples
            self._draws = True
        keys = (self._key(task.epoch, name) for name in task.ids)
        return [_one(dataset, index, number) for index, number in zip(ids, keys, strict=True)]

    def _look(self, probe: Probe) -> Seen:
        dataset, (index,) = _peeled(self._epoch(0), [probe.index])
        own, other = self._key(0, probe.index), key(self._seed, "probe", probe.index)
        sample = _one(dataset, index, own)
        content, length = digest(sample), size(sample)
        if not probe.twice:
            return Seen(content, length, outline(sample), steady=True, draws=False)
        again, else_ = digest(_one(dataset, index, own)), digest(_one(dataset, index, other))
        return Seen(content, length, outline(sample), steady=content == again, draws=content != else_)

    def _epoch(self, epoch: int) -> Any:
        return self._dataset.at(epoch) if isinstance(self._dataset, ByEpoch) else self._dataset

    def _key(self, epoch: int, index: int) -> int:
        return key(self._seed, "sample", epoch, index)

    def _what(self, task: Task | Probe) -> str:
        if isinstance(task, Probe):
            return f"sample {task.index}"
        return f"step {task.step}, micro-batch {task.micro}, samples {task.ids}"


def _rows(tensor: torch.Tensor, ids: list[Any]) -> torch.Tensor:
    """tensor[ids], by one thread.

    torch would share even a small batch among all threads of OpenMP, which then keep their CPUs busy for some milliseconds to
    be awake for more: beside the thread that launches a device's work, and the other ranks' (1.1 times the step, seen).
    """
    rows = torch.as_tensor(ids)
    # Where a program is planned for, indices are none that numpy could read.
    if type(rows) is not torch.Tensor or not plain(tensor):
        return tensor[rows]
    return torch.from_numpy(tensor.view(_WHOLE[tensor.itemsize]).numpy().take(rows.numpy(), axis=0)).view(
        tensor.dtype
    )


def numbers(found: Any) -> dict[str, float]:
    """What a `count` gave, by name; a bare number is called "count". Raises DataError unless finite and >= 0."""
    named = found if isinstance(found, Mapping) else {"count": found}
    counts = {str(name): float(value) for name, value in named.items()}
    wrong = {name: value for name, value in counts.items() if not (math.isfinite(value) and value >= 0)}
    if wrong or "samples" in counts:
        raise DataError("count= must give numbers of 0 or more, none called 'samples'", found=str(counts))
    return counts


def _one(dataset: Any, index: Any, number: int) -> Any:
    """The sample at `index`, under one key."""
    if callable(getattr(dataset, "__getitems__", None)):
        return _many(dataset, [index], number)[0]
    reseed(number)
    return dataset[index]


def _many(dataset: Any, indices: list[Any], number: int) -> list[Any]:
    reseed(number)
    found: list[Any] = dataset.__getitems__(indices)
    return found


def _peeled(dataset: Any, ids: list[int]) -> tuple[Any, list[Any]]:
    """The dataset inside torch's Subset and its indices there, so that samples are asked for one by one."""
    while type(dataset) is Subset:
        ids = [dataset.indices[index] for index in ids]
        dataset = dataset.dataset
    return dataset, ids


def _untouched() -> bool:
    """Nobody drew from the three generators since they were seeded with _QUIET."""
    return _drawn() == _first_draws()


@cache
def _first_draws() -> tuple[float, float, float]:
    reseed(_QUIET)
    return _drawn()


def _drawn() -> tuple[float, float, float]:
    host = torch.empty((), dtype=torch.float64, device="cpu").uniform_().item()
    return random.random(), float(np.random.random()), host  # noqa: NPY002 - user code draws from the global generator


def _portable(error: BaseException, where: str) -> BaseException:
    """The exception if it survives the way to another process, else one that tells the same."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - a user's exception may fail to pickle in any way
        return DataError(f"{type(error).__name__}: {error}", found=where)
    return error
