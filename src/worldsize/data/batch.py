"""Room: the arithmetic of batches. Knows lengths and positions as whole numbers; never samples, files or a rank.

A run is cut into steps of `global_batch` samples and each step into micro-batches of `micro_batch`; both belong to
the training, not to the machine. Ranks only say who does which whole micro-batch (`deal`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.config import Duration


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step sees: positions start <= p < stop of the order of `epoch`."""

    step: int
    epoch: int
    start: int
    stop: int
    ends_epoch: bool

    @property
    def samples(self) -> int:
        """The true number of samples in the step."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a training of unlimited length is cut into steps. Exact; any step is found without those before it.

    Args:
        length: samples in an epoch; None where it is not known before it was read, which is planned as one epoch
            without end.
        global_batch: samples of a step over all ranks.
        micro_batch: samples of a forward on one rank; the last one of a step may be ragged.
        drop_last: leave out the samples of an epoch that do not fill a step. Otherwise they make a last, shorter
            step, which counts for its true size.

    Raises:
        ConfigError: a batch below 1, or a micro-batch above the global batch.
        DataError: an epoch would have no step: the dataset is empty, or smaller than a step under `drop_last`.
    """

    length: int | None
    global_batch: int
    micro_batch: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        found = f"global_batch {self.global_batch}, micro_batch {self.micro_batch}"
        if not 1 <= self.micro_batch <= self.global_batch:
            raise ConfigError("a step needs 1 <= micro_batch <= global_batch", found=found)
        if self.length is not None and self.length < 1:
            raise DataError("the dataset is empty", found="0 samples", do="check its path and filters")
        if self.length is not None and self.steps_per_epoch == 0:
            raise DataError(
                "an epoch has no step: drop_last leaves out every sample",
                found=f"{self.length} samples, {found}",
                do="lower global_batch, or set drop_last=False for one short step an epoch",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch. Raises DataError where the length is not known."""
        length = self._known("steps per epoch")
        return length // self.global_batch if self.drop_last else -(-length // self.global_batch)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch's steps see. Raises DataError where the length is not known."""
        length = self._known("samples per epoch")
        return length - length % self.global_batch if self.drop_last else length

    @property
    def short(self) -> str | None:
        """A warning with the numbers where the whole dataset does not fill one step, else None."""
        if self.length is None or self.length >= self.global_batch:
            return None
        return f"{self.length} samples do not fill a global batch of {self.global_batch}: every step is that short"

    def step(self, index: int) -> Piece:
        """The piece of step `index`, counted from 0 over all epochs."""
        if self.length is None:
            return Piece(index, 0, index * self.global_batch, (index + 1) * self.global_batch, ends_epoch=False)
        epoch, within = divmod(index, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.length)
        return Piece(index, epoch, start, stop, ends_epoch=within == self.steps_per_epoch - 1)

    def samples_before(self, step: int) -> int:
        """How many samples the steps before `step` have seen together."""
        if self.length is None:
            return step * self.global_batch
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.samples_per_epoch + within * self.global_batch

    def micro(self, piece: Piece) -> list[tuple[int, int]]:
        """The piece cut into micro-batches: (start, stop) positions of each; only the last may be ragged."""
        cuts = range(piece.start, piece.stop, self.micro_batch)
        return [(start, min(start + self.micro_batch, piece.stop)) for start in cuts]

    def _known(self, what: str) -> int:
        if self.length is None:
            raise DataError(f"{what}: the length of the data is not known", do="use steps or tokens, not epochs")
        return self.length


def deal(count: int, ranks: int) -> list[tuple[int, int]]:
    """Whole micro-batches to ranks, contiguous, the larger shares first: 8 on 3 gives (0, 3), (3, 6), (6, 8)."""
    each, more = divmod(count, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return list(pairwise(starts))


def total_steps(duration: Duration, plan: BatchPlan) -> int:
    """Steps until `duration` is reached; samples are rounded up to whole steps.

    Raises:
        DataError: epochs of data of unknown length, or tokens, which are counted only as they are read.
    """
    if duration.unit == "st":
        return duration.count
    if duration.unit == "tok":
        raise DataError(f"'{duration}' has no total of steps", found="tokens are counted as they are read", do=_TOTAL)
    if duration.unit == "sa":
        return _steps_for(duration.count, plan)
    if plan.length is None:
        raise DataError(f"'{duration}' of unknown length has no total", do="use steps or tokens, like '500st'")
    return duration.count * plan.steps_per_epoch


_TOTAL = "give steps, epochs or samples where a total is needed, as for a learning-rate schedule"


def _steps_for(samples: int, plan: BatchPlan) -> int:
    if plan.length is None:
        return -(-samples // plan.global_batch)
    epochs, rest = divmod(samples, plan.samples_per_epoch)
    return epochs * plan.steps_per_epoch + -(-rest // plan.global_batch)


def ledger(
    plan: BatchPlan, seed: int, first: int, stop: int, shuffle: bool = True
) -> Iterator[tuple[int, int, list[int]]]:
    """(step, epoch, sample ids) of the steps first <= step < stop, from the order alone.

    Raises DataError where the length of the data is not known.
    """
    from worldsize.data.order import Order

    if plan.length is None:
        raise DataError("the ledger needs an order", found="data of unknown length")
    order = None
    for piece in map(plan.step, range(first, stop)):
        if order is None or piece.start == 0:
            order = Order(seed, piece.epoch, plan.length, shuffle)
        yield piece.step, piece.epoch, order.ids(piece.start, piece.stop)
