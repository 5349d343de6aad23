"""Room: a batch on its way from a worker to the device: small tensors in one piece of memory, sent and copied as one.

Torch sends each tensor of a batch through a file descriptor of its own, which takes the receiver a connection with a
handshake, then a copy to page-locked memory and one to the device. For batches of a few hundred kilobytes that costs
more than the numbers in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worldsize.data.tree import mapped

_INLINE = 256 * 1024
"""Bytes that a pipe carries faster than a file descriptor is handed over."""
_MOST = 16 * 1024 * 1024
"""Bytes above which one large copy to the device gains nothing over several."""
_ALIGNED = 256
"""Where tensors may begin: what the allocators of devices promise, and kernels are chosen by."""
_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor: where it lies in the memory."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Packed:
    """A batch whose tensors lie in one block of bytes.

    Args:
        outline: the batch with a place for each tensor.
        block: the bytes, a one-dimensional uint8 tensor.
    """

    __slots__ = ("block", "outline")

    def __init__(self, outline: Any, block: Tensor) -> None:
        self.outline, self.block = outline, block

    def __reduce__(self) -> tuple[Any, ...]:
        return _inline, (self.outline, self.block.numpy().tobytes())

    def pin_memory(self) -> Packed:
        """The same in page-locked memory."""
        return self if self.block.is_pinned() else Packed(self.outline, self.block.pin_memory())

    def opened(self, device: torch.device | None) -> Any:
        """The batch on `device`, or where it lies. Does not block where the memory is page-locked."""
        block = self.block if device is None else self.block.to(device, non_blocking=True)
        storage = block.untyped_storage()

        def tensor(place: _Place) -> Tensor:
            # Not a view: tensors that share a version counter could not be changed in place one by one.
            empty = torch.empty(0, dtype=place.dtype, device=block.device)
            return empty.set_(storage, place.start // place.dtype.itemsize, place.shape, place.stride)

        if self.whole:
            return type(self.outline)([tensor(place) for place in self.outline])
        return mapped(self.outline, _Place, tensor)

    @property
    def whole(self) -> bool:
        """Whether it is a plain tuple or list of tensors, as most are, and nothing besides."""
        return type(self.outline) in (tuple, list) and all(type(part) is _Place for part in self.outline)


def packed(value: Any, *, pin: bool = False) -> Any:
    """The value with its tensors in one block, or the value itself where that gains nothing or cannot be done.

    Args:
        value: what collate gave.
        pin: the block is page-locked, and may be larger: it does not travel any more.
    """
    if isinstance(value, Packed):
        return value.pin_memory() if pin else value
    places: dict[int, tuple[Tensor, _Place]] = {}
    end = 0

    def place(tensor: Tensor) -> Tensor | _Place:
        nonlocal end
        if not plain(tensor):
            return tensor
        if id(tensor) not in places:
            places[id(tensor)] = tensor, _Place(end, tuple(tensor.shape), tensor.stride(), tensor.dtype)
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return places[id(tensor)][1]

    outline = mapped(value, Tensor, place)
    if not 0 < end <= (_MOST if pin else _INLINE):
        return value
    return Packed(outline, _block(list(places.values()), end, pin=pin))


def small(value: Any) -> bool:
    """Whether a copy to the device is over before another stream could be told of it."""
    return isinstance(value, Packed) and value.block.numel() <= _INLINE


def _block(places: list[tuple[Tensor, _Place]], size: int, *, pin: bool) -> Tensor:
    block = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    content = block.numpy()
    for tensor, place in places:
        # Through numpy, a plain copy: torch would wake a team of threads for it, which takes longer.
        content[place.start : place.start + tensor.nbytes] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return block


def plain(tensor: Tensor) -> bool:
    """Whether its bytes in order, its shape and dtype are all there is to it."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _DTYPES
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def _inline(outline: Any, content: bytes) -> Packed:
    return Packed(outline, torch.frombuffer(bytearray(content), dtype=torch.uint8))
