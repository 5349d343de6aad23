"""Room: where DeepSpeed keeps which part of a parameter, its gradient and its optimizer state; whole tensors from and to it.

Stages 1 and 2 lay the parameters of a group behind each other and give each rank one piece of that; stage 3 cuts every
parameter by itself. Both cut flat: in checkpoints lie shards along the first dimension instead, made one parameter at a
time, so that no rank ever holds more than one of them whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of one parameter.

    Attributes:
        flat: the partition that it lies in, in the precision that the optimizer computes in.
        at: where in the partition it begins.
        begin: with which of the parameter's values.
        size: how many values it has; 0 where the parameter lies on other ranks only.
    """

    flat: Tensor
    at: int
    begin: int
    size: int

    def of(self, flat: Tensor) -> Tensor:
        """The same part of a tensor laid out like the partition."""
        return flat.detach().view(-1).narrow(0, self.at, self.size)


class Fragments(ABC):
    """The partitions of one engine.

    Args:
        optimizer: DeepSpeed's own.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def base(self) -> torch.optim.Optimizer:
        """The program's optimizer, which moves partitions now."""
        base: torch.optim.Optimizer = self._optimizer.optimizer
        return base

    @abstractmethod
    def part(self, parameter: nn.Parameter) -> Part:
        """Where this rank's part of a parameter lies."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's parts, reduced over all ranks."""

    @abstractmethod
    def spread(self) -> None:
        """Give every rank's forward pass the values of the partitions. Collective."""

    @abstractmethod
    def know_norm(self, norm: Callable[[], Tensor]) -> None:
        """Let this say the gradient norm in the optimizer's step; negative, the step is thrown away."""


class Grouped(Fragments):
    """Stages 1 and 2."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._group = {id(value): at for at, group in enumerate(optimizer.bit16_groups) for value in group}

    def part(self, parameter: nn.Parameter) -> Part:
        """From what DeepSpeed links to each parameter."""
        flat = self._optimizer.single_partition_of_fp32_groups[self._group[id(parameter)]]
        linked: Any = getattr(parameter, "_hp_mapping", None)
        if linked is None:
            return Part(flat, 0, 0, 0)
        here, there = linked.hp_fragment_address, linked.lp_fragment_address
        return Part(flat, here.start, there.start, here.numel)

    def gradients(self) -> list[Tensor]:
        """Pieces of parameters, or whole partitions where these are on the host."""
        inner = self._optimizer
        if inner.cpu_offload:
            return _there(flat.grad for flat in inner.single_partition_of_fp32_groups)
        return _there(grad for grads in inner.averaged_gradients.values() if grads for grad in grads)

    def spread(self) -> None:
        """Each rank's partition, in its place: DeepSpeed would gather them, for which gloo takes room for all once more."""
        inner = self._optimizer
        for at, parts in enumerate(inner.parallel_partitioned_bit16_groups):
            group = inner.real_dp_process_group[at]
            parts[dist.get_rank(group)].detach().copy_(inner.single_partition_of_fp32_groups[at].detach())
            for rank, part in enumerate(parts):
                dist.broadcast(part.detach(), group=group, group_src=rank)

    def know_norm(self, norm: Callable[[], Tensor]) -> None:
        """DeepSpeed's own would be a second pass over the gradients."""
        self._optimizer.scaled_global_norm = lambda norm_type=2: norm()  # noqa: ARG005 - its signature


class Single(Fragments):
    """Stage 3: each parameter in equal flat parts, the last one padded."""

    def __init__(self, optimizer: Any, frozen: Sequence[nn.Parameter]) -> None:
        super().__init__(optimizer)
        self._frozen = {id(value) for value in frozen}

    def part(self, parameter: nn.Parameter) -> Part:
        """Frozen parameters lie beside the optimizer's partitions, cut in the same way."""
        inner, partitioned = self._optimizer, vars(parameter)
        if id(parameter) in self._frozen:
            flat, at, length = partitioned["ds_tensor"], 0, partitioned["ds_tensor"].ds_numel
        else:
            group, at, length = inner.grad_position[inner.get_param_id(parameter)]
            flat = inner.fp32_partitioned_groups_flat[group]
        size = partitioned["ds_numel"]
        begin = min(dist.get_rank(inner.dp_process_group) * length, size)  # few values: the last ranks have none
        return Part(flat, at, begin, min(length, size - begin))

    def gradients(self) -> list[Tensor]:
        """Parts of parameters, or whole partitions where these are on the host."""
        inner = self._optimizer
        if inner.offload_optimizer:
            return _there(flat.grad for flat in inner.fp32_partitioned_groups_flat)
        return _there(grad for grads in inner.averaged_gradients.values() if grads for grad in grads)

    def spread(self) -> None:
        """As after a step: parameters that are too small to be cut are gathered again."""
        inner = self._optimizer
        inner._partition_all_parameters()  # noqa: SLF001
        for group in range(len(inner.fp16_groups)):
            inner._reassign_or_swap_out_partitioned_parameters(group)  # noqa: SLF001
        inner._post_step(set())  # noqa: SLF001

    def know_norm(self, norm: Callable[[], Tensor]) -> None:
        """DeepSpeed's own would be a second pass over the gradients."""
        self._optimizer._get_norm_groups = lambda: [norm()]  # noqa: SLF001


class Shards:
    """Tensors along their first dimension over all ranks, in host memory.

    Args:
        mesh: of the host's memory, over all ranks.
        device: where collectives over partitions run.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An empty one."""
        from torch.distributed.tensor import Shard, empty

        return empty(shape, dtype=dtype, device_mesh=self._mesh, placements=[Shard(0)])

    def gather(self, part: Part, piece: Tensor, shape: torch.Size) -> Tensor:
        """Shards of a tensor from all ranks' flat parts of it. Collective.

        Args:
            part: where this rank's part lies.
            piece: the values of this part.
            shape: of the whole tensor.
        """
        whole = torch.zeros(shape.numel(), dtype=piece.dtype, device=self._device)
        whole.narrow(0, part.begin, part.size).copy_(piece)
        dist.all_reduce(whole)
        made = self.room(shape, piece.dtype)
        rows = whole.view(shape).chunk(self._mesh.size())
        mine = made.to_local()  # type: ignore[attr-defined]
        if mine.numel():
            mine.copy_(rows[self._mesh.get_local_rank()])
        return made

    @staticmethod
    def scatter(shards: Tensor, part: Part, piece: Tensor) -> None:
        """The other way: this rank's flat part from everybody's shards. Collective.

        Args:
            shards: a tensor of `room`, or a whole one.
            part: where this rank's part lies.
            piece: where the values of this part go.
        """
        whole = shards.full_tensor() if hasattr(shards, "full_tensor") else shards
        piece.copy_(whole.detach().reshape(-1).narrow(0, part.begin, part.size))


def _there(grads: Any) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]
