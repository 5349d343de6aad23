"""Room: what lives on the device: storages as they come and go, their peak, and what goes over the wire. Knows no model.

Counted as torch's CUDA allocator does: in blocks of 512 B, and large ones to whole 2 MiB where the rest is not split off.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_BLOCK, _UNSPLIT, _SEGMENT, _LARGE = 512, 1 << 20, 2 << 20, 10 << 20
_STEP = 1.005
"""By how much a peak must grow before it is looked into again: looking at all that lives takes time."""
Kinds = dict[int, str]
"""What a storage is, by its address."""

_aten = torch.ops.aten


def rounded(size: int) -> int:
    """How many bytes the CUDA allocator takes for so many."""
    block = -(-size // _BLOCK) * _BLOCK
    if size < _LARGE:
        return block
    whole = -(-size // _SEGMENT) * _SEGMENT
    return whole if whole - block <= _UNSPLIT else block


@dataclass(slots=True)
class Block:
    """A live storage."""

    size: int
    phase: str
    watched: Any


@dataclass(slots=True)
class Peak:
    """The most that lived at once, and what it was."""

    size: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    _seen: int = 0

    def reach(self, size: int, look: Callable[[], dict[str, int]], extra: int = 0) -> None:
        """So much lives now."""
        if size <= self.size:
            return
        self.size = size
        if size > self._seen * _STEP:
            self._seen, self.parts = size, look()
            if extra:
                self.parts["temporary"] = self.parts.get("temporary", 0) + extra


@dataclass(slots=True)
class Traffic:
    """Bytes that a rank sends, by micro-batch: within its node and to others; and how many collectives there were."""

    within: dict[int, float] = field(default_factory=dict)
    between: dict[int, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: float, micro: int, *, near: bool) -> None:
        """One collective."""
        side = self.within if near else self.between
        side[micro] = side.get(micro, 0.0) + size
        self.calls[name] = self.calls.get(name, 0) + 1


class Meter(TorchDispatchMode):
    """Follows every operation below autograd.

    Args:
        known: what storages are that something points to: parameters, gradients and so on.
        local: ranks of a node; of traffic.
        answers: what operations return that would read a value, by name; real tensors answer for themselves.
    """

    def __init__(
        self,
        known: Callable[[], Kinds],
        local: int = 1,
        answers: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._local, self._answers = known, local, answers or {}
        self._live: dict[int, Block] = {}
        self._off = 0
        self.now = 0
        self.peaks: dict[str, Peak] = {}
        self.traffic = Traffic()
        self.phase, self.micro = "build", 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in self._answers:
            return self._answers[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if not self._off:
            if func.namespace in ("c10d", "_c10d_functional"):
                self._sent(func, args, result)
            self._take(func, args, result)
        return result

    @property
    def peak(self) -> Peak:
        """The highest of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.size, default=Peak())

    def take(self, tensor: torch.Tensor, phase: str | None = None) -> None:
        """Count a tensor's storage, unless it is counted already."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - fake storages have no address
        if key not in self._live:
            size = rounded(storage.nbytes())
            self._live[key] = Block(size, phase or self.phase, weakref.ref(storage, lambda _: self._gone(key)))
            self.now += size

    def follow(self) -> None:
        """Notice storages that are given another size: FSDP frees and allocates whole parameters so."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._resized(storage)
            return found

        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010 - its type says another owner

    def _resized(self, storage: torch.UntypedStorage) -> None:
        block = self._live.get(storage._cdata)  # noqa: SLF001
        if block is not None:
            size = rounded(storage.nbytes())
            self.now, block.size = self.now + size - block.size, size
            self._reach(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made in this block is no memory."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def restart(self) -> None:
        """The peaks from here on."""
        self.peaks = {}
        self._reach(0)

    def parts(self) -> dict[str, int]:
        """What lives now, by kind."""
        known = self._known()
        found: dict[str, int] = {}
        for key, block in self._live.items():
            kind = known.get(key, block.phase)
            found[kind] = found.get(kind, 0) + block.size
        return found

    def mark(self, tensor: torch.Tensor, phase: str) -> None:
        """Say what a tensor's storage is."""
        block = self._live.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        if block is not None:
            block.phase = phase

    def _take(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.take(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.take(leaf)
        self._reach(_workspace(func, args))

    def _reach(self, extra: int) -> None:
        self.peaks.setdefault(self.phase, Peak()).reach(self.now + extra, self.parts, extra)

    def _gone(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is not None:
            self.now -= block.size

    def _sent(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.partition("::")[2]  # noqa: SLF001
        cost = _COSTS.get(name.rstrip("_"))
        if cost is None:
            return
        ranks = _members(args)
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        sizes = [leaf.untyped_storage().nbytes() if leaf.numel() == 0 else leaf.nbytes for leaf in tensors]
        nodes = {rank // self._local for rank in ranks}
        for leaf in tensors:
            self.mark(leaf, "buffers")
        size = max(sizes, default=0) * cost(len(ranks))
        self.traffic.add(name.strip("_"), size, self.micro, near=len(nodes) == 1)


def _ring(count: int) -> float:
    return (count - 1) / count if count else 0.0


_COSTS: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(
        ("_allgather_base", "allgather", "all_gather_into_tensor", "allgather_into_tensor_coalesced"), _ring
    ),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor"), _ring),
    **dict.fromkeys(("allreduce", "all_reduce"), lambda count: 2 * _ring(count)),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), _ring),
    **dict.fromkeys(("broadcast", "send"), lambda count: float(count > 1)),
}
"""What a rank sends in a ring, over the largest tensor of a call (Thakur et al., 2005)."""


def _members(args: tuple[Any, ...]) -> list[int]:
    """The ranks of a collective's group."""
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
            except RuntimeError:  # another object than a group
                continue
        if isinstance(value, str) and value.isdecimal():
            return dist.get_process_group_ranks(resolve(value))
    return [0]


def _workspace(func: Any, args: tuple[Any, ...]) -> int:
    """What a CUDA kernel takes for itself meanwhile: attention adds the queries' gradient up in float32."""
    if func in _ATTENTION_BACKWARD:
        query = args[1]
        return rounded(query.numel() * 4)
    return 0


_ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward.default,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention_backward.default,  # noqa: SLF001
)
