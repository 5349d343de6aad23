"""Room: whether a tensor is sharded over ranks (a DTensor), asked without loading what shards tensors.

Loading torch's DTensor and its checkpoints takes as long as half of torch. Where nobody has loaded it, no tensor is one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_MODULE = "torch.distributed.tensor"


def is_sharded(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor."""
    # A module that another thread is loading right now has made no tensor yet.
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, where a shard knows a way of its own to be gathered (FSDP2's extensions) without that."""
    if not is_sharded(tensor) or held(tensor) is tensor._local_tensor:  # noqa: SLF001 - as below
        return tensor
    return like(held(tensor), tensor)


def held(tensor: DTensor) -> torch.Tensor:
    """The very tensor in which this rank's part of a DTensor lies, the same at each question."""
    part: Any = tensor._local_tensor  # noqa: SLF001 - to_local gives another one at each question
    inner: torch.Tensor = part
    if hasattr(part, "fsdp_pre_all_gather"):
        inner = getattr(part, part.__tensor_flatten__()[0][0])
    return inner


def like(part: torch.Tensor, whole: DTensor) -> DTensor:
    """A DTensor in which `part` itself lies, laid over ranks as `whole` is."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `from_local` would copy an offloaded part to the mesh's device.
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta)
    return type(whole)(part, spec, requires_grad=False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; the tensor itself where it is not sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part
