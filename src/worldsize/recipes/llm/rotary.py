"""Room: rotary position embeddings and their stretchings, by the papers that `shape.Rotary` names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from worldsize.recipes.llm.checked import Checked, alike
from worldsize.runtime.sharded import is_sharded

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


def in_one_pass(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The same, on CUDA by a kernel; where layers are compiled the compiler makes one."""
    narrow = heads.dtype in _KINDS and cosines.dtype in _KINDS
    if heads.device.type != "cuda" or not narrow or torch.compiler.is_compiling() or is_sharded(heads):
        return rotate(heads, cosines, sines)
    found: Tensor = _Rotation.apply(heads, cosines, sines)  # type: ignore[no-untyped-call]
    return found


class _Rotation(torch.autograd.Function):
    """Of heads; the way back turns by the same angles the other way."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        found: Tensor = _rotated(heads, cosines, sines)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(gradient, cosines, -sines), None, None


@torch.library.custom_op(
    "worldsize::rotated", mutates_args=(), schema="(Tensor heads, Tensor cosines, Tensor sines) -> Tensor"
)
def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As `rotate`, rounded to the heads' kind; both halves of cosines and sines are alike."""
    return _ROTATED(heads, cosines, sines)


@_rotated.register_fake
def _(heads: Tensor, _cosines: Tensor, _sines: Tensor) -> Tensor:
    return torch.empty_like(heads, memory_format=torch.contiguous_format)


def _plain(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return rotate(heads, cosines, sines).to(heads.dtype)


def _key(heads: Tensor, cosines: Tensor, _sines: Tensor) -> tuple[int, ...]:
    kinds = _KINDS.index(heads.dtype), _KINDS.index(cosines.dtype)
    return *kinds, *heads.shape[2:], alike(heads.stride(1)), alike(heads.shape[1]), int(len(cosines) == len(heads))


def _example(drawn: torch.Generator, key: tuple[int, ...]) -> tuple[Tensor, ...]:
    kind, of_tables, count, size, _stride, length, whole = key
    heads = torch.randn(2, length, count, size, generator=drawn, device=drawn.device).to(_KINDS[kind])
    angles = torch.rand(2 if whole else 1, length, 1, size // 2, generator=drawn, device=drawn.device) * 7
    angles = torch.cat((angles, angles), dim=-1)
    return heads, angles.cos().to(_KINDS[of_tables]), angles.sin().to(_KINDS[of_tables])


_KINDS = (torch.bfloat16, torch.float16, torch.float32)
_ROTATED: Checked[Tensor] = Checked("rotated", _plain, _key, _example)


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
