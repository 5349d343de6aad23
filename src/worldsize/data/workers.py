"""Room: the processes in which batches are made: no stop signal ends them, the rank does, and none outlives it.

Schedulers send a stop to all processes of a job alike. A rank makes its step and commits; without its workers it could not.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import torch

from worldsize.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

_EVERY = 1.0
"""Seconds between two looks at whether the rank is there."""


def enter(init: Callable[[int], None] | None, worker: int) -> None:
    """What a worker does first; `init` is the user's `worker_init_fn`."""
    signals.pass_by()
    threading.Thread(target=_leave_with, args=(os.getppid(),), name="rank", daemon=True).start()
    if init is not None:
        init(worker)


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iteration over torch's loader, with workers that `enter`."""
    if loader.num_workers == 0 or loader._iterator is not None:  # noqa: SLF001 - workers that are there already
        return iter(loader)
    with signals.held():
        if _method(loader) != "fork":
            # It lets stop signals through when it starts: not while workers do.
            resource_tracker.ensure_running()
    with signals.held():
        results: Any = iter(loader)
    for process in results._workers:  # noqa: SLF001 - torch tells them nowhere else
        popen = process._popen  # noqa: SLF001 - multiprocessing ends what is left through it
        popen.terminate = partial(_kill, weakref.ref(results), popen)
    found: Iterator[Any] = results
    return found


def _method(loader: DataLoader[Any]) -> str:
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    return str(context.get_start_method())


def _kill(results: weakref.ref[Any], popen: Any) -> None:
    """In place of SIGTERM: torch and multiprocessing send it to workers that do not end, and wait for their end."""
    iterator = results()
    if iterator is not None and iterator._worker_pids_set:  # noqa: SLF001 - as torch does where it ends them
        # Else torch would say that the worker died.
        torch._C._remove_worker_pids(id(iterator))  # noqa: SLF001
        iterator._worker_pids_set = False  # noqa: SLF001
    popen.kill()


def _leave_with(rank: int) -> None:
    """Torch's own worker looks too, but never comes to it while it waits for a sample, or for room to put one."""
    while os.getppid() == rank:
        time.sleep(_EVERY)
    os._exit(1)
