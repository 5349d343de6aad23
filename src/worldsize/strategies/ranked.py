"""Room: what strategies of several ranks share: the process groups, small collectives, equal weights."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from worldsize.errors import LayoutError
from worldsize.runtime.grid import AXES
from worldsize.strategies.base import Setting, Strategy, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor, nn

    from worldsize.strategies.base import Coming, Options
    from worldsize.strategies.context import Parts
    from worldsize.strategies.routing import Entry
    from worldsize.strategies.splitting import Split


class Ranked(Strategy):
    """Gradients come out as the mean over the data-parallel ranks."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        setting.session.need_group()
        self._splits: dict[nn.Module, Split] = {}

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The grid's axes as torch knows them. Collective when first asked for.

        Axes of length 1 are left out, but for the shards: there is always something to lay a model over.
        """
        sizes = {axis: self.grid.size(axis) for axis in AXES}
        written = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}
        return init_device_mesh(self.device.type, tuple(written.values()), mesh_dim_names=tuple(written))

    @cached_property
    def peers(self) -> dist.ProcessGroup | None:
        """The ranks that have the other shares of the batch, for the same part of the model; None where that is all."""
        if self.ranks == self.grid.world:
            return None
        data = self.data
        group: dist.ProcessGroup = (data if data.ndim == 1 else data._flatten("dp")).get_group()  # noqa: SLF001
        return group

    @property
    def data(self) -> DeviceMesh:
        """The part of the mesh over which the batch is dealt: (dp_replicate and) dp_shard."""
        names: tuple[str, ...] = self.mesh.mesh_dim_names or ()
        axes = tuple(axis for axis in names if axis in ("dp_replicate", "dp_shard"))
        found: DeviceMesh = self.mesh if axes == names else self.mesh[axes]
        return found

    @cached_property
    def shards(self) -> DeviceMesh:
        """Over what a model is sharded and its gradients are summed: the shares of the batch, and the parts of sequences."""
        if self.grid.size("cp") == 1:
            return self.data
        inner: DeviceMesh = self.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")  # noqa: SLF001
        if self.grid.size("dp_replicate") == 1:
            return inner
        both: DeviceMesh = self.mesh["dp_replicate", "dp_shard_cp"]
        return both

    @cached_property
    def parts(self) -> Parts | None:
        """The ranks that have other parts of the same sequences; None where sequences are whole."""
        if self.grid.size("cp") == 1:
            return None
        from worldsize.strategies.context import Parts

        return Parts(self.mesh["cp"])

    def split(
        self, model: nn.Module, fill: Callable[[nn.Module], None], options: Options
    ) -> Callable[[nn.Module], None]:
        """Make `fill` lay what it fills over the tensor ranks, where there are any."""
        if self.grid.size("tp") == 1:
            return fill
        from worldsize.strategies.splitting import Split

        self._splits[model] = made = Split(model, fill, options, self.mesh["tp"], whole=self.grid.size("pp") == 1)
        return made.fill

    def guarded(self, model: nn.Module, entry: Entry) -> Entry:
        """A way into the model that parts of sequences take, or that is watched for what tensor ranks would do wrongly."""
        watched = self._splits[model].guarded(entry) if model in self._splits else entry
        if self.parts is None:
            return watched
        from worldsize.strategies.context import Parted

        return Parted(model, watched, self.parts)

    def open(self, model: nn.Module, batches: Sequence[Coming]) -> None:
        """Tells the tensor ranks, where there are any."""
        del batches
        if model in self._splits:
            self._splits[model].open()

    def close(self, model: nn.Module) -> None:
        """Gradients of parts are summed over tensor ranks, where there are any."""
        if model in self._splits:
            self._splits[model].close()

    @property
    def averaged(self) -> int:
        """Both of torch's wrappers divide by the number of ranks."""
        return self.ranks * self.grid.size("cp")

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
