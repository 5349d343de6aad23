"""Room: data. Which sample each step sees, and how it gets to the device.

A run takes any of these as its data:

- a map-style dataset (`__len__` and `__getitem__`, or `__getitems__`): shuffled by our order, each epoch
  anew;
- a torch `DataLoader`, as it is: dataset, collate_fn, batch_size (the micro-batch), workers, pinning and
  worker_init_fn are taken over; `shuffle=True` stands for our order, `shuffle=False` for the dataset's; any
  other sampler is asked for the order of each epoch under a key of that epoch. One that is already split by
  rank (DistributedSampler) is refused;
- an iterable dataset: read on one rank, in order, and dealt to the others;
- `stream(make, parts=64)`: data read in parts, by all ranks;
- `generated(fn, length)`: samples made by a function of their index; `by_epoch(fn)`: a dataset made for each
  epoch;
- `ordered(data)`: any of the first two in its own order.

Random numbers: before each sample the generators of torch, numpy and random are seeded by a key of (seed, epoch,
index), before each collate by one of (seed, step, micro-batch). So a sample is the same under any number of ranks
and workers, before and after a resume. A dataset that draws from a generator of its own is refused (it is found
by fetching one sample twice), unless it is accepted with accept="own-generator". With `__getitems__` the key is
that of the first sample asked for.

Batches: `BatchPlan` cuts an epoch into steps of `global_batch` samples, and those into micro-batches. An epoch's
last step may be short, and counts for its true size; `drop_last` leaves it out. An empty dataset, or one smaller
than a step under `drop_last`, is an error; without `drop_last` the whole dataset is then one short step.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldsize.data.kinds import by_epoch, generated, ordered, stream

__all__ = ["by_epoch", "generated", "ordered", "stream"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from worldsize.data import kinds

        return getattr(kinds, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
