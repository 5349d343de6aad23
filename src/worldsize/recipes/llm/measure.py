"""Room: how much memory a rank may use, and how much a stretch of work took at most.

On GPUs the allocator counts; on CPUs we do. Of a host it is not known what a process may have: a given limit holds, else
this rank's share of what is free.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_HEADROOM = 0.05
"""Of a GPU: for pieces of memory too small to be of use, for what libraries and exchanges allocate later."""
_HOST_SHARE = 0.8
"""Of a host's free memory: for data, saves and other programs."""
_CGROUP = Path("/sys/fs/cgroup")


class Gauge(Protocol):
    """Counts what is allocated."""

    def peak(self, work: Callable[[], Any]) -> int:
        """The most bytes that there were at a time while `work` was done, with those of before."""
        ...

    def limit(self, given: int | None, ranks: int) -> int:
        """Bytes that this rank may use in all: what was given, else what the device has.

        Args:
            given: by a person.
            ranks: how many share this host.
        """
        ...


class Device:
    """A CUDA device, by its allocator's own numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self, work: Callable[[], Any]) -> int:
        """See `Gauge`."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))

    def limit(self, given: int | None, ranks: int) -> int:
        """See `Gauge`. What other processes have is taken off."""
        del ranks
        if given is not None:
            return given
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device) - _HEADROOM * total)


class Host:
    """A process on CPUs: parameters and buffers, and every tensor that operations make. Compiled layers run uncompiled in it.

    Args:
        held: the model's tensors.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        storages = {storage._cdata: storage.nbytes() for tensor in held for storage in _storages(tensor)}  # noqa: SLF001
        self._before: int = sum(storages.values())

    def peak(self, work: Callable[[], Any]) -> int:
        """See `Gauge`."""
        gc.collect()
        live = _Live()
        with live:
            work()
        return self._before + live.most

    def limit(self, given: int | None, ranks: int) -> int:
        """See `Gauge`."""
        return int(_HOST_SHARE * _free() / ranks) + self._before if given is None else given


class _Live(TorchDispatchMode):
    """The bytes of storages that operations made and that still live, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._changing: set[int] = set()
        self._sum = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # shapes that somebody asks for: nothing is there
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # tensors of tensors come again as their parts
        given = {storage._cdata for storage in _all(args)}  # noqa: SLF001
        found = func(*args, **(kwargs or {}))
        made = [storage for storage in _all(found) if storage._cdata not in given | self._alive.keys()]  # noqa: SLF001
        for storage in made:
            self._add(storage, changing=func is torch.ops.aten.empty.memory_format)
        if made:
            self.most = max(self.most, self._sum + self._changed())
        return found

    def _add(self, storage: torch.UntypedStorage, *, changing: bool) -> None:
        number = storage._cdata  # noqa: SLF001
        self._alive[number] = weakref.ref(storage, lambda _: self._gone(number))
        if changing:
            self._changing.add(number)
        else:
            self._sizes[number] = storage.nbytes()
            self._sum += storage.nbytes()

    def _gone(self, number: int) -> None:
        self._alive.pop(number, None)
        self._changing.discard(number)
        self._sum -= self._sizes.pop(number, 0)

    def _changed(self) -> int:
        """Who asks for empty memory may give it back, or take more, without an operation: sharding does."""
        found = [self._alive[number]() for number in self._changing]
        return sum(storage.nbytes() for storage in found if storage is not None)


def _all(values: Any) -> list[torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [storage for tensor in tensors for storage in _storages(tensor)]


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Of a sharded tensor its part's."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return [part.untyped_storage()] if type(part) in (torch.Tensor, torch.nn.Parameter) else []


def _free() -> int:
    """Bytes that this host, or this container of it, has left."""
    import psutil

    found = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        most, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        found = min(found, most - used)
    return max(found, 0)
