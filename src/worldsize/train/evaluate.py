"""Room: evaluation that counts each sample once at any world size, and outputs in the order of the data."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from worldsize.data.batch import BatchPlan
from worldsize.data.loader import Loader
from worldsize.data.sources import adopt
from worldsize.errors import DataError, StepError
from worldsize.runtime import signals
from worldsize.runtime.clock import EVALUATION
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed, reseeded
from worldsize.strategies.base import full

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from worldsize.data.loader import Micro
    from worldsize.train.engine import Engine


_KEPT = 4
"""How many data sets' loaders are kept between evaluations."""


class Evaluator:
    """Evaluations of one run; loaders are kept between them.

    Args:
        engine: models, strategy and agreement of the run.
        micro_batch: samples per forward pass where the data does not say it itself.
    """

    def __init__(self, engine: Engine, micro_batch: int | None) -> None:
        self._engine, self._micro_batch = engine, micro_batch
        self._loaders: dict[int, tuple[Any, Loader]] = {}

    def scores(self, fn: Callable[[Any], Mapping[str, Any]], data: Any, model: nn.Module | None) -> dict[str, float]:
        """Means of what `fn` gives, each sample counted once.

        Args:
            fn: batch -> {name: one number a sample (tensor), or (sum, n)}.
            data: a dataset or DataLoader; its order does not matter.
            model: which model is put into evaluation mode; all of the run's where None.

        Raises:
            StepError: a tensor has another number of values than the batch has samples.
            DataError: there is nothing to evaluate.
            Stopped: a stop was asked for meanwhile, agreed by all ranks.
        """
        sums: dict[str, list[Any]] = {}
        before = self._engine.clock.enter(EVALUATION)
        for micro in self._visit(data, model):
            for name, score in fn(micro.batch).items():
                if not micro.dummy:
                    total, count = _score(name, score, len(micro.ids))
                    entry = sums.setdefault(name, [0.0, 0.0])
                    entry[0], entry[1] = entry[0] + total, entry[1] + count
        mine = {name: (float(total), float(count)) for name, (total, count) in sums.items() if self._counts}
        found = _means(self._engine.comm.gather(mine))
        self._engine.clock.enter(before)
        return found

    def outputs(self, fn: Callable[[Any], Any], data: Any, model: nn.Module | None) -> torch.Tensor:
        """What `fn` gives for each sample, in the data's order, on every rank, in host memory.

        Args:
            fn: batch -> tensor with one row a sample.
            data: a dataset or DataLoader.
            model: as in `scores`.
        """
        rows: list[tuple[list[int], torch.Tensor]] = []
        before = self._engine.clock.enter(EVALUATION)
        for micro in self._visit(data, model):
            found = full(fn(micro.batch)).detach().cpu()
            if not micro.dummy:
                rows.append((micro.ids, found))
        everyone = [row for rank in self._engine.comm.gather(rows if self._counts else []) for row in rank]
        numbers = torch.tensor([number for ids, _ in everyone for number in ids])
        self._engine.clock.enter(before)
        return torch.cat([found for _, found in everyone])[torch.argsort(numbers)]

    def _visit(self, data: Any, model: nn.Module | None) -> Iterator[Micro]:
        loader = self._loader(data)
        device, seed = self._engine.device, self._engine.seed
        modules = [model] if model is not None else [placed.module for placed in self._engine.parts.models.values()]
        with _evaluating(modules), torch.no_grad(), reseeded(key(seed, "evaluation"), device):
            pending = self._engine.comm.start_any([signals.received() is not None])
            for batches in loader.steps(0, loader.plan.steps_per_epoch):
                for micro in batches.micro:
                    self._engine.pulse.beat += 1
                    reseed(key(seed, "evaluation", micro.ids[0]), device)
                    yield micro
                if pending.wait()[0]:
                    raise Stopped
                pending = self._engine.comm.start_any([signals.received() is not None])
            pending.wait()

    @property
    def _counts(self) -> bool:
        return self._engine.strategy.grid.speaks

    def _loader(self, data: Any) -> Loader:
        if id(data) not in self._loaders:
            source, ranks = adopt(data, self._engine.seed), self._engine.strategy.ranks
            if not source.length:
                raise DataError(
                    "evaluation needs data of known length that is not empty", found=f"length {source.length}"
                )
            size = min(source.micro_batch or self._micro_batch or source.length, source.length)
            while len(self._loaders) >= _KEPT:
                self._loaders.pop(next(iter(self._loaders)))[1].close()
            # The data is held with its loader: an id alone could come again for another object.
            self._loaders[id(data)] = (
                data,
                Loader(
                    data,
                    BatchPlan(source.length, size * ranks, size),
                    seed=key(self._engine.seed, "evaluation"),
                    rank=self._engine.strategy.rank,
                    ranks=ranks,
                    padding="equal" if self._engine.padding == "equal" else "none",
                    comm=self._engine.comm,
                    device=self._engine.device,
                    shuffle=False,
                    dtype_of_floats=self._engine.precision.inputs,
                ),
            )
        return self._loaders[id(data)][1]

    def close(self) -> None:
        """End the loaders' workers; a later evaluation starts its own."""
        while self._loaders:
            self._loaders.popitem()[1][1].close()


class Stopped(BaseException):
    """Leaves an evaluation, and the loop body that asked for it, when a stop was agreed."""


@contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    were = [(inner, inner.training) for module in modules for inner in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for inner, training in were:
            inner.training = training


def _score(name: str, score: Any, samples: int) -> tuple[Any, float]:
    if isinstance(score, tuple):
        total, count = score
        return total, float(count)
    if not isinstance(score, torch.Tensor) or score.numel() != samples:
        raise StepError(
            f"evaluation of {name!r} must give one number a sample, or (sum, n)",
            found=f"{tuple(score.shape) if isinstance(score, torch.Tensor) else type(score).__name__} for {samples} samples",
        )
    return full(score).sum(dtype=torch.float64), float(samples)


def _means(ranks: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    found = {}
    for name in names:
        count = sum(rank[name][1] for rank in ranks if name in rank)
        found[name] = sum(rank[name][0] for rank in ranks if name in rank) / count if count else float("nan")
    return found
