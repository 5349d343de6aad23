"""Room: host copies of this rank's pieces, as fast as the bus allows. The training stands still for those that it may change.

The same memory, pinned where tensors live on a CUDA device, is used for every save: see `memory`. Only the pieces that this
rank writes are copied: with replicas on N ranks, an N-th of the state each.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import torch

from worldsize.checkpoint.facts import piece_bytes
from worldsize.checkpoint.memory import HostMemory
from worldsize.errors import CheckpointError
from worldsize.runtime.sharded import is_sharded, local

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan

_LOOK_S = 5e-3

Ties = tuple[dict[str, str], set[str]]
"""Tensors that are one and the same, later name -> first name; and the names of which a rank cannot tell."""


class Staging:
    """The host memory for one plan.

    Args:
        plan: the pieces that this rank writes.
        device: the CUDA device of the tensors, to register the memory with it: copies from it run at full speed then.
            None where they are on the host.
        gently: take longer, and hold up less what runs on the device.
    """

    def __init__(self, plan: SavePlan, device: torch.device | None, *, gently: bool = False) -> None:
        self.plan = plan
        sizes = [piece_bytes(item.tensor_data) for item in plan.items]
        side = None if device is None else torch.cuda.Stream(device)
        self._memory = HostMemory(sizes, device, gently=gently)
        self._side = side if self._memory.pinned else None
        self._under: _Under | None = None
        self.torn = False
        """Whether something was changed before `hold` that should not have been: the copies are of no use."""
        self.copies: dict[MetadataIndex, Tensor] = {
            item.index: _view(piece, item.tensor_data)
            for item, piece in zip(plan.items, self._memory.pieces, strict=True)
        }

    def fill(self, tensors: Mapping[str, Tensor], later: Collection[str] = ()) -> None:
        """Copy the pieces. When it returns, the training may change its tensors; those named in `later` only after `hold`.

        Copies of these run beside the training, where tensors live on a device. They are queued behind the others, all at
        once: a thread that hands them over bit by bit waits for the interpreter each time.
        """
        from torch.distributed.checkpoint.utils import find_state_dict_object

        devices, delayed, self.torn = set(), [], False
        with torch.no_grad():
            for item in self.plan.items:
                shard = find_state_dict_object(cast("dict[str, Any]", tensors), item.index).detach()
                if self._side is not None and shard.is_cuda and item.index.fqn in later:
                    delayed.append((self.copies[item.index], shard))
                    continue
                self.copies[item.index].copy_(shard, non_blocking=self._memory.pinned)
                devices.add(shard.device)
        copied = [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"]
        self._under = _Under.begin(self._side, delayed) if self._side is not None and delayed else None
        for event in copied:
            event.synchronize()

    def hold(self) -> None:
        """Local and cheap: let the device wait for the copies that run beside the training, before it changes their tensors."""
        if self._under is not None and not self._under.held:
            self.torn = not self._under.hold()

    def arrive(self) -> None:
        """Wait, on the host, for the copies that run beside the training. Any thread may."""
        if self._under is not None:
            self._under.arrive()

    def close(self) -> None:
        """Give the memory back."""
        self.arrive()
        self._under = None
        self.copies.clear()
        self._memory.close()


class _Under:
    """Copies from a device that are under way on a stream of their own."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, sources: list[Tensor]) -> None:
        self.event, self.held, self._device = event, False, device
        # In-place changes count up a version, whoever makes them.
        self._sources = [(source, source._version) for source in sources]  # noqa: SLF001 - torch has no other

    @classmethod
    def begin(cls, side: torch.cuda.Stream, pairs: list[tuple[Tensor, Tensor]]) -> _Under:
        """Queue the copies of (host, device), behind what the current stream has to do so far."""
        # A copy to the device that follows one from it in the same stream waits for all that the copying engine was given up
        # to then: the next batch for gigabytes of these, and the passes with it (seen on an H200). Behind a kernel it does not.
        torch.zeros((), device=side.device)
        side.wait_stream(torch.cuda.current_stream(side.device))
        event = torch.cuda.Event()
        with torch.cuda.stream(side), torch.no_grad():
            for host, source in pairs:
                host.copy_(source, non_blocking=True)
                source.record_stream(side)  # its memory is not given away before
            event.record()
        return cls(event, side.device, [source for _, source in pairs])

    def arrive(self) -> None:
        """See `Staging.arrive`."""
        # A thread begins on device 0: see `memory`. And it does not wait inside of CUDA, beside the one that launches work.
        with torch.cuda.device(self._device):
            while not self.event.query():
                time.sleep(_LOOK_S)

    def hold(self) -> bool:
        """See `Staging.hold`. Returns whether nothing was changed so far."""
        self.held = True
        same = all(source._version == version for source, version in self._sources)  # noqa: SLF001
        self._sources.clear()
        torch.cuda.current_stream(self._device).wait_event(self.event)
        return same


def _view(piece: Tensor, data: Any) -> Tensor:
    """A piece of bytes as what is kept there."""
    shape, dtype = data.chunk.sizes, data.properties.dtype
    return piece.view(dtype).view(shape) if piece.numel() else torch.empty(shape, dtype=dtype)


def cuda_device(tensors: Mapping[str, Tensor]) -> torch.device | None:
    """The CUDA device on which these tensors live, if any."""
    return next((local(tensor).device for tensor in tensors.values() if tensor.device.type == "cuda"), None)


def check_dense(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError on what is no dense tensor, by its name."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(f"{name} is not a dense tensor", found=str(kind), do="make it one before saving")


def signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Equal as long as the same plan serves: names, shapes, dtypes and how each is laid over the ranks."""
    return tuple((name, tensor.shape, tensor.dtype, *_placed(tensor)) for name, tensor in tensors.items())


def _placed(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else ()


def tied(tensors: Mapping[str, Tensor]) -> Ties:
    """Which of these tensors are one and the same.

    A rank whose piece of a tensor is empty cannot tell whether two names share it.
    """
    first: dict[tuple[Any, ...], str] = {}
    pairs: dict[str, str] = {}
    unknown: set[str] = set()
    for name, tensor in tensors.items():
        mine = local(tensor)
        if not mine.numel():
            unknown.add(name)
            continue
        where = (mine.untyped_storage().data_ptr(), mine.storage_offset(), mine.stride(), mine.device)
        owner = first.setdefault((*where, mine.dtype, mine.shape, tensor.shape), name)
        if owner != name:
            pairs[name] = owner
    return pairs, unknown


def agreed_ties(answers: list[Ties]) -> dict[str, str]:
    """The ties that some rank sees and none denies."""
    seen = {name: first for pairs, _ in answers for name, first in pairs.items()}
    return {
        name: first
        for name, first in seen.items()
        if all(pairs.get(name) == first or name in unknown for pairs, unknown in answers)
    }
