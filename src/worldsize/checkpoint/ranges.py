"""Room: reading a box of a saved tensor from its file, and next to nothing beside it.

DCP itself reads a piece whole and cuts the box out of it: a rank that needs a quarter of a tensor that one rank wrote
would read all of it, and hold it. Each piece is an uncompressed archive of torch.save with the values in row-major order.
"""

from __future__ import annotations

import errno
import io
import math
import os
import zipfile
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch

from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Buffer

BUFFER = 16 << 20
"""Bytes that are held beside the tensors being filled."""

_PAGE = 4096
"""Runs shorter than this cost more than what lies between them."""
_LOCAL_HEADER = 30


class _Part(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        done = os.preadv(self._descriptor, [view], self._start + self._at) if view else 0
        self._at += done
        return done


def values(descriptor: int, start: int, length: int, size: int) -> int:
    """Where the values of a piece begin in its file.

    Args:
        descriptor: of the file.
        start: where the piece begins.
        length: how many bytes it takes.
        size: how many bytes of values it must hold.

    Raises:
        CheckpointError: the piece is no archive that holds just these values.
    """
    part = _Part(descriptor, start, length)
    try:
        with zipfile.ZipFile(part) as archive:
            (record,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(f"the piece at {start} holds no tensor", found=str(error)) from error
    if record.file_size != size or record.compress_type != zipfile.ZIP_STORED:
        found = f"{record.file_size:,} bytes of values where {size:,} belong"
        raise CheckpointError(f"the piece at {start} is not laid out as it was written", found=found)
    part.seek(record.header_offset)
    header = part.read(_LOCAL_HEADER) or b""
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return start + record.header_offset + _LOCAL_HEADER + name + extra


def fill(
    descriptor: int,
    start: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    target: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill a tensor with a box of a larger one that lies in a file.

    Args:
        descriptor: of the file.
        start: where the values of the larger tensor begin.
        sizes: its shape.
        offsets: where the box begins in it.
        target: of the box's shape, on any device.
        dtype: of the values in the file; the target's where None.

    Raises:
        OSError: reading failed, or the file ends too early.
    """
    if not target.numel():
        return
    if not sizes:
        sizes, offsets, target = [1], [0], target.reshape(1)
    dtype = dtype or target.dtype
    item = dtype.itemsize
    steps = [math.prod(sizes[dim + 1 :]) * item for dim in range(len(sizes))]
    cut = _cut(sizes, target.shape, steps)
    wide = [*target.shape[: cut + 1], *sizes[cut + 1 :]]
    row = math.prod(wide[1:]) * item
    if row > BUFFER and len(sizes) > 1:
        for index in range(len(target)):
            fill(
                descriptor,
                start + (offsets[0] + index) * steps[0],
                sizes[1:],
                offsets[1:],
                target[index],
                dtype=dtype,
            )
        return
    begin = start + sum(offset * step for offset, step in zip(offsets[: cut + 1], steps, strict=False))
    rows = min(len(target), max(1, BUFFER // row))
    buffer = torch.empty(rows * row, dtype=torch.uint8)
    for first in range(0, len(target), rows):
        band = [min(rows, len(target) - first), *wide[1:]]
        part = buffer[: band[0] * row]
        _read(descriptor, begin + first * steps[0], band[: cut + 1], steps, part)
        found = part.view(dtype).view(band)
        for dim in range(cut + 1, len(sizes)):
            found = found.narrow(dim, offsets[dim], target.shape[dim])
        target[first : first + band[0]].copy_(found)


def _cut(sizes: Sequence[int], lengths: Sequence[int], steps: Sequence[int]) -> int:
    """The dimension whose runs are read at once: the innermost that is cut, or one further out where runs are short."""
    cut = max((dim for dim in range(len(sizes)) if lengths[dim] != sizes[dim]), default=0)
    while cut and lengths[cut] * steps[cut] < _PAGE:
        cut -= 1
    return cut


def _read(descriptor: int, start: int, lengths: Sequence[int], steps: Sequence[int], target: Tensor) -> None:
    """Read a box that is cut in its outer dimensions only: one run for each index of all but the last of them."""
    *outer, last = lengths
    run = last * steps[len(outer)]
    view = memoryview(cast("Any", target.numpy()))
    for number, index in enumerate(product(*map(range, outer))):
        place = start + sum(at * step for at, step in zip(index, steps, strict=False))
        _exactly(descriptor, view[number * run : (number + 1) * run], place)


def _exactly(descriptor: int, view: memoryview, place: int) -> None:
    while view:
        done = os.preadv(descriptor, [view], place)
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        view, place = view[done:], place + done
