"""Room: the norm of all gradients, the same under every strategy, and scaling by it.

Shards count once: the squares of a rank's own shards are summed over its mesh (Pascanu et al., 2013, for clipping).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from worldsize.runtime.sharded import is_sharded, local

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm over all gradients together, a 0-dim tensor on `device`; collective where they are sharded.

    Those that lie over ranks alike are reduced together, and the groups combined.
    """
    groups: dict[_Laid | None, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[(grad.device_mesh, grad.placements) if is_sharded(grad) else None].append(grad)
    parts = [_together(group, laid, device) for laid, group in groups.items()]
    if not parts:
        return torch.zeros((), device=device)
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))


def limit_(grads: Sequence[Tensor], size: Tensor | None, divisor: float, most: float | None) -> None:
    """Divide gradients, and scale them down where they are too large together.

    Args:
        grads: all of one optimizer.
        size: their norm once divided; None where nothing limits it.
        divisor: what they are divided by.
        most: the largest norm they may have.
    """
    if most is None or size is None:
        scale_(grads, 1.0 / divisor)
    else:
        # The factor of torch.nn.utils.clip_grad_norm_, joined with the division: one pass over the gradients.
        # A norm that is no number limits nothing: who has the first such gradient can still be told.
        scale_(grads, (most / (size + 1e-6)).nan_to_num_(nan=1.0).clamp_(max=1.0) / divisor)


def scale_(grads: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply every gradient in place, whatever it is laid over."""
    if isinstance(factor, float) and factor == 1.0:
        return
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in map(local, grads):
        by_device[grad.device, grad.dtype].append(grad)
    for (device, dtype), group in by_device.items():
        by = factor.to(device=device, dtype=dtype) if isinstance(factor, torch.Tensor) else factor
        torch._foreach_mul_(group, by)


_Laid = tuple["DeviceMesh", tuple["Placement", ...]]


def _together(grads: list[Tensor], laid: _Laid | None, device: torch.device) -> Tensor:
    """The norm of those that lie over ranks alike."""
    if laid is None:
        return torch.nn.utils.get_total_norm(grads).to(device)
    mesh, placements = laid
    over = [index for index, placed in enumerate(placements) if not placed.is_replicate()]
    if not all(placements[index].is_shard() for index in over):
        whole: Tensor = torch.nn.utils.get_total_norm(grads).full_tensor().to(device)  # type: ignore[attr-defined]
        return whole
    # To compute on DTensors takes some milliseconds of the host for a few hundred of them, however small.
    square = torch.nn.utils.get_total_norm([local(grad) for grad in grads]).to(device).square()
    for index in over:
        dist.all_reduce(square, group=mesh.get_group(index))
    return square.sqrt()
