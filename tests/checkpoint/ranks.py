"""Room: run a function on n real gloo ranks and get what each returned."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 60


def run_ranks(function: Callable[..., Any], size: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """`function(comm, *args)` in `size` processes. Returns the values in rank order; raises where one failed."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank, args=((rank, size, store, backend), results, function, args))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get() for _ in ranks)
        for process in ranks:
            process.join(TIMEOUT)
    results.close()
    failed = {rank: text for rank, (text, _) in found.items() if text}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return [found[rank][1] for rank in range(size)]


def _rank(
    place: tuple[int, int, str, str], results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    from worldsize.runtime.comm import Ranks

    rank, size, store, backend = place
    try:
        timeout = timedelta(seconds=TIMEOUT)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        comm = Ranks(dist.new_group(backend="gloo", timeout=timeout), timeout)
        results.put((rank, ("", function(comm, *args))))
    except BaseException:  # noqa: BLE001 the test raises it
        results.put((rank, (traceback.format_exc(), None)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
