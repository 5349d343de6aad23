"""Room: what strategies of several ranks share: the process groups, small collectives, equal weights."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from worldsize.errors import LayoutError
from worldsize.strategies.base import Setting, Strategy, brief

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor, nn


class Ranked(Strategy):
    """Gradients come out as the mean over the data-parallel ranks."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        setting.session.need_group()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The grid's axes as torch knows them; those of length 1 are left out. Collective when first asked for."""
        written = self.grid.written() or {"dp_shard": 1}
        return init_device_mesh(self.device.type, tuple(written.values()), mesh_dim_names=tuple(written))

    @cached_property
    def peers(self) -> dist.ProcessGroup | None:
        """The ranks that have the other shares of the batch, for the same part of the model; None where that is all."""
        if self.ranks == self.grid.world:
            return None
        axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in self.grid.written())
        if not axes:
            alone: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            return alone
        mesh = self.mesh[axes[0]] if len(axes) == 1 else self.mesh[axes]._flatten("dp")  # noqa: SLF001
        group: dist.ProcessGroup = mesh.get_group()
        return group

    @property
    def averaged(self) -> int:
        """Both of torch's wrappers divide by the number of ranks."""
        return self.ranks

    def start_sum_(self, tensor: Tensor) -> Callable[[], Any]:
        """An all-reduce on the device's own backend, over the world: what does not count is zero there."""
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        wait: Callable[[], Any] = work.wait
        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """An all-gather on the device's own backend, over the shares of the batch."""
        found = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(found, tensor.contiguous(), group=self.peers)
        return found

    def refuse_differences(self, model: nn.Module) -> None:
        """Ranks that built different weights would train a mixture of them. Collective.

        Raises:
            LayoutError: with the names of what differs.
        """
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        different = self._differing(state)
        if different:
            raise LayoutError(
                "the ranks built different weights",
                found=brief(different),
                do="give run.model the class or a function, so that it is built under the model's own random key",
            )

    def differing_buffers(self, model: nn.Module) -> list[str]:
        """Names of saved buffers that ranks moved in different ways. Running statistics are equal once composed."""
        saved = model.state_dict().keys()
        return self._differing({name: value for name, value in model.named_buffers() if name in saved})

    def _differing(self, values: dict[str, Tensor]) -> list[str]:
        digests = {name: _digest(value.detach()) for name, value in values.items()}
        everyone = self.setting.session.comm.gather(digests)
        names = sorted({name for each in everyone for name in each})
        # A pipeline's stages have different ones.
        return [name for name in names if len({each[name] for each in everyone if name in each}) > 1]


def _digest(value: Tensor) -> str:
    """Sum and norm tell two draws apart, and need no copy of the weights."""
    total = value.sum().item() if not value.is_floating_point() else value.sum(dtype=torch.float64).item()
    size = torch.linalg.vector_norm(value, dtype=torch.float64).item() if value.is_floating_point() else 0.0
    return f"{tuple(value.shape)} {value.dtype} {total!r} {size!r}"
