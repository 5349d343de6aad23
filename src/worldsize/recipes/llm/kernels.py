# ruff: noqa: ANN001, ANN202, N803, PLR0917 - Triton's functions have no types, its constants are written large
"""Room: passes over a layer's widest tensors as kernels (Triton, CUDA only).

What each gives is said in `gated`, `tensorwise`, `rotary`.

A program has a line of numbers, or a tile of rows and columns. An adapter's part of a tile is a product over the adapter's
rank, whose factors stay in the cache. e5m2 is made of float16 by whole numbers: in tiles that are also written by
columns, Triton 3.6's own conversion gave other numbers for these than for those written by rows (seen on an H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worldsize.recipes.llm.frozen import BACKWARD, FORWARD, LEAST

_LINE, _LINE_WARPS = 4096, 8
_ROWS, _COLUMNS, _WARPS = 16, 128, 4
_TURNED = (128, 64, 8)
"""Rows, columns and warps of a tile that is written by columns too."""
_MOST_RANK = 256
_MOST, _MOST_BACK = torch.finfo(FORWARD).max, torch.finfo(BACKWARD).max


@triton.jit
def _scaled(value, factor, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(value / factor, -MOST), MOST)


@triton.jit
def _e4m3(value, factor, MOST: tl.constexpr):
    return _scaled(value, factor, MOST).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _e5m2(value, factor, MOST: tl.constexpr):
    """The upper half of float16, rounded to the nearest, ties to even. Bits."""
    bits = _scaled(value, factor, MOST).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    return ((bits + 127 + ((bits >> 8) & 1)) >> 8).to(tl.uint8)


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows (ROWS, 1) and columns (1, COLUMNS) of this program, and which there are."""
    across = tl.cdiv(columns, COLUMNS)  # one number counts tiles: a second may not be as large as there are rows
    row = ((tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _store_turned(into, bits, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile, by columns."""
    across = tl.cdiv(columns, COLUMNS)
    row = ((tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[None, :]
    column = ((tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    tl.store(into + column * rows + row, tl.trans(bits), (row < rows) & (column < columns))


@triton.jit
def _store_most(most, value):
    """The largest of this program. Maxima pass over what is no number: it counts as infinite, and so does the factor then."""
    value = tl.abs(value.to(tl.float32))
    largest = tl.max(tl.where(value == value, value, float("inf")))  # noqa: PLR0124 - what is no number differs from itself
    tl.store(most + tl.program_id(0), largest)


@triton.jit
def _larger(one, other):
    """Of the two the one that is farther from 0, or no number."""
    return tl.where((tl.abs(one) >= tl.abs(other)) | (one != one), one, other)  # noqa: PLR0124 - likewise


@triton.jit
def _product(
    thin, stride, factor, inner_stride, outer_stride, rank, rows, columns, row, column, found, RANK: tl.constexpr
):
    """Add a product over the rank to a tile: of `thin`, a row of which is `stride` long, and `factor` by its strides."""
    k = tl.arange(0, RANK)
    first = tl.load(thin + row * stride + k[None, :], (row < rows) & (k < rank)[None, :], 0.0)
    at = k[:, None] * inner_stride + column * outer_stride
    second = tl.load(factor + at, (column < columns) & (k < rank)[:, None], 0.0)
    return tl.dot(first, second, found, input_precision="ieee")


@triton.jit
def _gate_and_up(raw, low, gate_up, up_up, rank, rows, columns, row, column, there, RANK: tl.constexpr):
    """With their adapters."""
    at = row * (2 * columns) + column
    gate = tl.load(raw + at, there, 0.0).to(tl.float32)
    up = tl.load(raw + at + columns, there, 0.0).to(tl.float32)
    gate = _product(low, 2 * rank, gate_up, 1, rank, rank, rows, columns, row, column, gate, RANK)
    up = _product(low + rank, 2 * rank, up_up, 1, rank, rank, rows, columns, row, column, up, RANK)
    return gate, up


@triton.jit
def _gated(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _back(gate, up, slope):
    """Gradients of gate and up, and silu(gate) * up."""
    opened = tl.sigmoid(gate)
    passed = gate * opened
    return slope * up * (opened + passed * (1.0 - opened)), slope * passed, passed * up


@triton.jit
def _open(raw, low, gate_up, up_up, out, most, rows, columns, rank,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):  # fmt: skip
    row, column, there = _place(rows, columns, ROWS, COLUMNS)
    gate, up = _gate_and_up(raw, low, gate_up, up_up, rank, rows, columns, row, column, there, RANK)
    found = _gated(gate, up).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, found, there)
    _store_most(most, found)


@triton.jit
def _close(raw, low, gate_up, up_up, sent, thin, down, slopes, out, most, rows, columns, rank,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):  # fmt: skip
    row, column, there = _place(rows, columns, ROWS, COLUMNS)
    slope = tl.load(sent + row * columns + column, there, 0.0).to(tl.float32)
    slope = _product(thin, rank, down, columns, 1, rank, rows, columns, row, column, slope, RANK)
    gate, up = _gate_and_up(raw, low, gate_up, up_up, rank, rows, columns, row, column, there, RANK)
    of_gate, of_up, inner = _back(gate, up, slope)
    kind = slopes.dtype.element_ty
    at = row * (2 * columns) + column
    of_gate, of_up = of_gate.to(kind), of_up.to(kind)
    tl.store(out + row * columns + column, inner.to(kind), there)
    tl.store(slopes + at, of_gate, there)
    tl.store(slopes + at + columns, of_up, there)
    _store_most(most, _larger(of_gate.to(tl.float32), of_up.to(tl.float32)))


@triton.jit
def _rotate(heads, stride, cosines, sines, out, period, count, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """All heads of one position, a row of which is `stride` long; tables begin anew after `period` rows."""
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    there, at = (head < count) & (pair < half), head * (2 * half) + pair
    first = tl.load(heads + row * stride + at, there, 0.0).to(tl.float32)
    second = tl.load(heads + row * stride + at + half, there, 0.0).to(tl.float32)
    turn = (row % period) * (2 * half) + pair
    cosine = tl.load(cosines + turn, pair < half, 0.0).to(tl.float32)
    sine = tl.load(sines + turn, pair < half, 0.0).to(tl.float32)
    into = out + row * (count * 2 * half) + at
    tl.store(into, (first * cosine - second * sine).to(out.dtype.element_ty), there)
    tl.store(into + half, (second * cosine + first * sine).to(out.dtype.element_ty), there)


@triton.jit
def _gate_most(gate, up, most, count, LINE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    g = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    _store_most(most, _gated(g, tl.load(up + at, at < count, 0.0).to(tl.float32)))


@triton.jit
def _gate_round(gate, up, factor, out, count, MOST: tl.constexpr, LINE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    g = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    found = _gated(g, tl.load(up + at, at < count, 0.0).to(tl.float32))
    tl.store(out + at, _e4m3(found, tl.load(factor), MOST), at < count)


@triton.jit
def _back_most(gate, up, slope, most, count, LINE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    g = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    u = tl.load(up + at, at < count, 0.0).to(tl.float32)
    of_gate, of_up, _ = _back(g, u, tl.load(slope + at, at < count, 0.0).to(tl.float32))
    _store_most(most, _larger(of_gate, of_up))


@triton.jit
def _back_round(gate, up, slope, factor, inner_factor, of_gate, of_up, of_gate_turned, of_up_turned, inner_turned,
                rows, columns, MOST: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row, column, there = _place(rows, columns, ROWS, COLUMNS)
    at = row * columns + column
    g = tl.load(gate + at, there, 0.0).to(tl.float32)
    u = tl.load(up + at, there, 0.0).to(tl.float32)
    g, u, inner = _back(g, u, tl.load(slope + at, there, 0.0).to(tl.float32))
    g = _e5m2(g, tl.load(factor), MOST)
    u = _e5m2(u, tl.load(factor), MOST)
    tl.store(of_gate + at, g, there)
    tl.store(of_up + at, u, there)
    _store_turned(of_gate_turned, g, rows, columns, ROWS, COLUMNS)
    _store_turned(of_up_turned, u, rows, columns, ROWS, COLUMNS)
    _store_turned(inner_turned, _e4m3(inner, tl.load(inner_factor), INNER), rows, columns, ROWS, COLUMNS)


@triton.jit
def _round_both(
    value, factor, out, turned, rows, columns, MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, there = _place(rows, columns, ROWS, COLUMNS)
    at = row * columns + column
    bits = _e5m2(tl.load(value + at, there, 0.0).to(tl.float32), tl.load(factor), MOST)
    tl.store(out + at, bits, there)
    _store_turned(turned, bits, rows, columns, ROWS, COLUMNS)


@triton.jit
def _turn(value, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, there = _place(rows, columns, ROWS, COLUMNS)
    _store_turned(out, tl.load(value + row * columns + column, there, 0), rows, columns, ROWS, COLUMNS)


@triton.jit
def _round(value, factor, out, count, MOST: tl.constexpr, LINE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    found = tl.load(value + at, at < count, 0.0).to(tl.float32) * tl.load(factor)
    tl.store(
        out + at, tl.minimum(tl.maximum(found, -MOST), MOST).to(tl.float8e4nv).to(tl.uint8, bitcast=True), at < count
    )


def opened(raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor) -> tuple[Tensor, Tensor]:
    """See `gated._opened`."""
    (columns, rank), rows = gate_up.shape, len(raw)
    grid = _tiles(rows, columns, (_ROWS, _COLUMNS))
    out, most = raw.new_empty(rows, columns), raw.new_empty(grid, dtype=torch.float32)
    wide = _wide(rank)
    _open[grid](
        raw, low, gate_up, up_up, out, most, rows, columns, rank,
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=wide, num_warps=_WARPS,
    )  # fmt: skip
    return out, most.amax()


def closed(
    raw: Tensor, low: Tensor, gate_up: Tensor, up_up: Tensor, sent: Tensor, thin: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `gated._closed`."""
    (columns, rank), rows = gate_up.shape, len(raw)
    grid = _tiles(rows, columns, (_ROWS, _COLUMNS))
    slopes, out = torch.empty_like(raw), raw.new_empty(rows, columns)
    most, wide = raw.new_empty(grid, dtype=torch.float32), _wide(rank)
    _close[grid](
        raw, low, gate_up, up_up, sent, thin, down, slopes, out, most, rows, columns, rank,
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=wide, num_warps=_WARPS,
    )  # fmt: skip
    return slopes, out, most.amax()


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """See `rotary._rotated`."""
    samples, length, count, size = heads.shape
    if heads.stride()[2:] != (size, 1) or (samples > 1 and heads.stride(0) != length * heads.stride(1)):
        heads = heads.contiguous()
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    if len(out):
        _rotate[(samples * length,)](
            heads, heads.stride(1), cosines.contiguous(), sines.contiguous(), out, len(cosines) * length, count, size // 2,
            HEADS=triton.next_power_of_2(count), HALF=triton.next_power_of_2(size // 2), num_warps=_WARPS,
        )  # fmt: skip
    return out


def factor_of_opened(gate: Tensor, up: Tensor) -> Tensor:
    """See `tensorwise._inner_factor`."""
    count, grid = gate.numel(), _line(gate.numel())
    most = gate.new_empty(grid, dtype=torch.float32)
    _gate_most[grid](gate, up, most, count, LINE=_LINE, num_warps=_LINE_WARPS)
    return most.amax().clamp_(min=LEAST).div_(_MOST)


def opened_in_eight(gate: Tensor, up: Tensor, factor: Tensor) -> Tensor:
    """See `tensorwise._opened`."""
    count, out = gate.numel(), torch.empty_like(gate, dtype=FORWARD)
    _gate_round[_line(count)](gate, up, factor, _bits(out), count, MOST=_MOST, LINE=_LINE, num_warps=_LINE_WARPS)
    return out


def closed_in_eight(gate: Tensor, up: Tensor, slope: Tensor, inner_factor: Tensor) -> tuple[Tensor, ...]:
    """See `tensorwise._closed`."""
    (rows, columns), count, grid = gate.shape, gate.numel(), _line(gate.numel())
    most = gate.new_empty(grid, dtype=torch.float32)
    _back_most[grid](gate, up, slope, most, count, LINE=_LINE, num_warps=_LINE_WARPS)
    factor = most.amax().clamp_(min=LEAST).div_(_MOST_BACK)
    plain = [torch.empty_like(gate, dtype=BACKWARD) for _ in range(2)]
    turned = [gate.new_empty(columns, rows, dtype=kind) for kind in (BACKWARD, BACKWARD, FORWARD)]
    _back_round[_tiles(rows, columns, _TURNED)](
        gate, up, slope, factor, inner_factor, *map(_bits, (*plain, *turned)), rows, columns,
        MOST=_MOST_BACK, INNER=_MOST, ROWS=_TURNED[0], COLUMNS=_TURNED[1], num_warps=_TURNED[2],
    )  # fmt: skip
    return *plain, *turned, factor


def rounded_both(value: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """See `tensorwise._rounded_both`."""
    rows, columns = value.shape
    out, turned = torch.empty_like(value, dtype=BACKWARD), value.new_empty(columns, rows, dtype=BACKWARD)
    _round_both[_tiles(rows, columns, _TURNED)](
        value, factor, _bits(out), _bits(turned), rows, columns,
        MOST=_MOST_BACK, ROWS=_TURNED[0], COLUMNS=_TURNED[1], num_warps=_TURNED[2],
    )  # fmt: skip
    return out, turned


def turned(value: Tensor) -> Tensor:
    """See `tensorwise._turned`."""
    rows, columns = value.shape
    out = value.new_empty(columns, rows)
    _turn[_tiles(rows, columns, _TURNED)](
        _bits(value), _bits(out), rows, columns, ROWS=_TURNED[0], COLUMNS=_TURNED[1], num_warps=_TURNED[2]
    )
    return out


def scaled(value: Tensor, scale: Tensor) -> Tensor:
    """See `tensorwise.scaled`."""
    count, out = value.numel(), torch.empty_like(value, dtype=FORWARD)
    if count:
        _round[_line(count)](value, scale, _bits(out), count, MOST=_MOST, LINE=_LINE, num_warps=_LINE_WARPS)
    return out


def _wide(rank: int) -> int:
    """Of the rank's dimension in a product: GPUs multiply 16 at least."""
    if rank > _MOST_RANK:
        raise ValueError(f"a program holds factors of a rank up to {_MOST_RANK}, this is {rank}")
    return max(16, int(triton.next_power_of_2(rank)))


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.uint8)


def _line(count: int) -> tuple[int]:
    return (triton.cdiv(count, _LINE),)


def _tiles(rows: int, columns: int, tile: tuple[int, ...]) -> tuple[int]:
    return (triton.cdiv(columns, tile[1]) * triton.cdiv(rows, tile[0]),)
