"""Datasets and helpers that the tests of the data room share."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils.data import Dataset, IterableDataset

from worldsize.data.loader import Loader, StepBatches
from worldsize.runtime.comm import Alone, Ranks
from worldsize.runtime.farewell import dismiss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from worldsize.data.batch import BatchPlan


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index), dtype=torch.float64)


class Noisy(Numbers):
    """Sample i is i and a draw from each of the three generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()  # noqa: NPY002
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class Stateful:
    """The numbers of one part, with a position of their own; `opened` counts how many samples were really read."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers, self._at = numbers, 0
        self.opened = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._at < len(self._numbers):
            self._at, self.opened = self._at + 1, self.opened + 1
            yield torch.tensor([float(self._numbers[self._at - 1]), torch.rand(()).item()])

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._at = state["at"]


class Shards(IterableDataset[torch.Tensor]):
    """B066: ten samples on rank 0 and nine on the others."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(9 + (dist.get_rank() == 0 if dist.is_initialized() else 1)):
            yield torch.tensor([float(number), torch.rand(()).item()])


def loader(source: Any, plan: BatchPlan, **settings: Any) -> Loader:
    """A loader of the world of one, where nothing else is asked for."""
    given: dict[str, Any] = {"seed": 1, "rank": 0, "ranks": 1, "padding": "none", "comm": Alone()}
    return Loader(source, plan, **(given | settings))


def told(steps: Iterator[StepBatches]) -> list[Any]:
    """Steps as plain values that can be compared."""
    return [(step.piece, step.totals, step.micro_total, [_plain(micro) for micro in step.micro]) for step in steps]


def _plain(micro: Any) -> tuple[Any, ...]:
    batch = micro.batch.tolist() if isinstance(micro.batch, torch.Tensor) else micro.batch
    return micro.index, micro.ids, batch, micro.count, micro.dummy


def joined(shares: list[list[Any]]) -> list[Any]:
    """What ranks were told, put together: each step with its real micro-batches in the order of their index."""
    steps = []
    for parts in zip(*shares, strict=True):
        assert all(part[:3] == parts[0][:3] for part in parts)
        micro = [each for part in parts for each in part[3] if not each[4]]
        steps.append((*parts[0][:3], sorted(micro)))
    return steps


def gloo(ranks: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """`work(comm, *args)` on that many real processes; what each returned, in rank order."""
    spawn(_rank, (ranks, str(folder), work, args), nprocs=ranks)
    return [pickle.loads((folder / f"{ranks}-{rank}").read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    limit = dt.timedelta(seconds=60)
    store = f"file://{folder}/rendezvous-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    found = work(Ranks(dist.group.WORLD, limit), *args)
    with open(os.path.join(folder, f"{ranks}-{rank}"), "wb") as file:  # noqa: PTH118, PTH123 - a path as text
        file.write(pickle.dumps(found))
    dismiss()
