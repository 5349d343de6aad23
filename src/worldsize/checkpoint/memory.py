"""Room: the host memory that copies of this rank's pieces go to: given by the system before it is used, pinned for a device.

To register memory with CUDA holds up whoever launches work on that device: five seconds for 50 GB (seen on an H200). It is
done area by area, so that the training's launches come in between.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from worldsize.checkpoint import disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_ALIGN = 64
_AREA = 1 << 29
_PORTION = 64 << 20
"""Bytes that a thread asks the system for at once."""


class HostMemory:
    """Memory for some pieces, each in one part.

    Args:
        sizes: of the pieces, in bytes.
        device: the CUDA device to register the memory with: copies from it run at full speed then. None for none.
        gently: leave the device to the training for as long as was needed, after each area.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | None, *, gently: bool = False) -> None:
        self.pieces: list[Tensor] = []
        """One of uint8 for each size."""
        self._registered: list[Tensor] = []
        self.pinned = device is not None
        """Whether all of it is registered with the device."""
        try:
            for group in _groups([-(-size // _ALIGN) * _ALIGN for size in sizes]):
                area = _area(sum(group))
                if self.pinned and area.numel():
                    self._register(area, device, gently=gently)
                for start in accumulate(group[:-1], initial=0):
                    self.pieces.append(_part(area, start, sizes[len(self.pieces)]))
        except BaseException:
            self.close()  # what goes away registered would be taken for what comes to its place
            raise
        self.pinned = self.pinned and bool(self._registered)

    def close(self) -> None:
        """Give it back."""
        for area in self._registered:
            torch.cuda.cudart().cudaHostUnregister(area.data_ptr())
        self._registered.clear()
        self.pieces.clear()
        self.pinned = False

    def _register(self, area: Tensor, device: torch.device | None, *, gently: bool) -> None:
        began = time.monotonic()
        # A thread begins on device 0; asking CUDA for anything there would take memory of a device of another rank.
        with torch.cuda.device(device):
            self.pinned = int(torch.cuda.cudart().cudaHostRegister(area.data_ptr(), area.numel(), 0)) == 0
        if self.pinned:
            self._registered.append(area)
        if gently:
            time.sleep(time.monotonic() - began)


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    """The same in order, each group as large as an area, or one piece."""
    group: list[int] = []
    total = 0
    for size in sizes:
        if group and total + size > _AREA:
            yield group
            group, total = [], 0
        group.append(size)
        total += size
    if group:
        yield group


def _area(size: int) -> Tensor:
    """Host memory that the system has already given, so that neither a copy nor CUDA waits for it page by page.

    In large pages, asked for by several threads: tens of gigabytes take a few seconds instead of a minute. It is left out of
    forked processes, which would otherwise be given a copy of what is registered with a device.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for wish in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # as far as this system knows them
            area.madvise(getattr(mmap, wish))
    block = torch.frombuffer(area, dtype=torch.uint8)
    pages = block.numpy()[:: mmap.PAGESIZE]
    step = _PORTION // mmap.PAGESIZE

    def ask(start: int) -> None:
        pages[start : start + step] = 0

    disk.spread(ask, range(0, len(pages), step))
    return block


def _part(area: Tensor, start: int, size: int) -> Tensor:
    """With a storage of its own size: DCP copies any other one before it writes."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(area.numpy(), dtype=torch.uint8, count=size, offset=start)
