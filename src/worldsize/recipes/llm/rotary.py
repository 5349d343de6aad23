"""Room: rotary position embeddings and their stretchings, by the papers that `shape.Rotary` names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.recipes.llm.shape import Rotary


def frequencies(rotary: Rotary, size: int) -> Tensor:
    """Radians a position for each pair of dimensions of a head of that size: (size / 2,), float32."""
    plain = 1.0 / rotary.theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        return _by_wavelength(rotary, plain)
    if rotary.kind == "yarn":
        return _by_dimension(rotary, plain, size)
    return plain


def scale(rotary: Rotary) -> float:
    """By what cosines and sines are multiplied: the temperature of YaRN's section 3.4, else 1."""
    if rotary.scale is not None:
        return rotary.scale
    return 0.1 * math.log(rotary.factor) + 1.0 if rotary.kind == "yarn" and rotary.factor > 1 else 1.0


def tables(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions of shape (samples or 1, length): each (samples or 1, length, 1, size)."""
    with torch.autocast(positions.device.type, enabled=False):
        angles = positions[..., None].to(frequencies.dtype) * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn pairs (i, i + size/2) of heads of shape (samples, length, heads, size) by their positions' angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _by_wavelength(rotary: Rotary, plain: Tensor) -> Tensor:
    """Short waves stay, long ones are stretched, those between are mixed of both."""
    turns = rotary.original * plain / (2 * math.pi)  # within the original length
    kept = ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0, 1)
    return plain * kept + plain / rotary.factor * (1 - kept)


def _by_dimension(rotary: Rotary, plain: Tensor, size: int) -> Tensor:
    """A ramp over dimensions between those that turn `high` and `low` times within the original length."""

    def dimension(turns: float) -> float:
        return size * math.log(rotary.original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = dimension(rotary.high), dimension(rotary.low)
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last > first else 0.001
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain * kept + plain / rotary.factor * (1 - kept)
