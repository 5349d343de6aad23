"""Room: what a saved tensor is, and how large a piece of it. Loads nothing of torch's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What a saved tensor is, whatever layout wrote it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def piece_bytes(data: Any) -> int:
    """Bytes of one piece of a plan."""
    return int(data.chunk.sizes.numel() * data.properties.dtype.itemsize)
