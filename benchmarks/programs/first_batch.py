"""Room: one process that makes an epoch's order and takes the first batch of it: how long, and how much memory."""

from __future__ import annotations

import json
import resource
import sys
import time
from itertools import islice

BATCH, RANKS, KIB = 64, 2, 1024


class Length:
    """A dataset that has nothing but a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def peak() -> int:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def ours(length: int) -> tuple[float, int]:
    """Seconds to the first batch of a shuffled epoch, and bytes that it took."""
    from worldsize.data.order import Order

    before, began = peak(), time.perf_counter()
    ids = Order(0, 1, length).ids(0, BATCH)
    took = time.perf_counter() - began
    assert len(set(ids)) == BATCH
    return took, peak() - before


def peer(length: int) -> tuple[float, int]:
    """The same with torch's DistributedSampler for one of two ranks."""
    from torch.utils.data import DistributedSampler

    before, began = peak(), time.perf_counter()
    sampler = DistributedSampler(Length(length), num_replicas=RANKS, rank=0, seed=0)
    sampler.set_epoch(1)
    ids = list(islice(sampler, BATCH))
    took = time.perf_counter() - began
    assert len(set(ids)) == BATCH
    return took, peak() - before


if __name__ == "__main__":
    seconds, memory = {"ours": ours, "peer": peer}[sys.argv[1]](int(float(sys.argv[2])))
    print(json.dumps({"ms": seconds * 1e3, "MB": memory / 1e6}))
