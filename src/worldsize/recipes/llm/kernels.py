"""Room: the two passes of a gated MLP over its widest tensors, as kernels (Triton, CUDA only). See `gated` for the formulas.

Each program has a tile of rows and columns. An adapter's part of it is a product over the adapter's rank, far below what
reading the tile costs: nowhere are projections with their adapters written down.
"""

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _WARPS = 16, 128, 4


@triton.jit
def _forward(raw, low, gate_factor, up_factor, out, most, rows, columns, rank,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):  # fmt: skip
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, RANK)
    there = (r < rows)[:, None] & (c < columns)[None, :]
    thin, factor = (r < rows)[:, None] & (k < rank)[None, :], (c < columns)[None, :] & (k < rank)[:, None]
    at, low_at, factor_at = (
        r[:, None] * (2 * columns) + c[None, :],
        r[:, None] * (2 * rank) + k[None, :],
        c[None, :] * rank + k[:, None],
    )
    gate = tl.load(raw + at, there, 0.0).to(tl.float32)
    gate = tl.dot(tl.load(low + low_at, thin, 0.0), tl.load(gate_factor + factor_at, factor, 0.0), gate)
    up = tl.load(raw + at + columns, there, 0.0).to(tl.float32)
    up = tl.dot(tl.load(low + low_at + rank, thin, 0.0), tl.load(up_factor + factor_at, factor, 0.0), up)
    found = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + r[:, None] * columns + c[None, :], found, there)
    tl.store(most + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(tl.abs(found.to(tl.float32))))


@triton.jit
def _backward(raw, low, gate_factor, up_factor, raw_slope, thin_slope, down_factor, slopes, out, most, rows, columns, rank,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):  # fmt: skip
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, RANK)
    there = (r < rows)[:, None] & (c < columns)[None, :]
    thin, factor = (r < rows)[:, None] & (k < rank)[None, :], (c < columns)[None, :] & (k < rank)[:, None]
    at, narrow_at, low_at, factor_at = (
        r[:, None] * (2 * columns) + c[None, :],
        r[:, None] * columns + c[None, :],
        r[:, None] * (2 * rank) + k[None, :],
        c[None, :] * rank + k[:, None],
    )
    slope = tl.load(raw_slope + narrow_at, there, 0.0).to(tl.float32)
    slope = tl.dot(
        tl.load(thin_slope + r[:, None] * rank + k[None, :], thin, 0.0),
        tl.load(down_factor + k[:, None] * columns + c[None, :], factor, 0.0),
        slope,
    )
    gate = tl.load(raw + at, there, 0.0).to(tl.float32)
    gate = tl.dot(tl.load(low + low_at, thin, 0.0), tl.load(gate_factor + factor_at, factor, 0.0), gate)
    up = tl.load(raw + at + columns, there, 0.0).to(tl.float32)
    up = tl.dot(tl.load(low + low_at + rank, thin, 0.0), tl.load(up_factor + factor_at, factor, 0.0), up)
    open_ = tl.sigmoid(gate)
    passed = gate * open_
    kind = slopes.dtype.element_ty
    of_gate = (slope * up * (open_ + passed * (1.0 - open_))).to(kind)
    of_up = (slope * passed).to(kind)
    tl.store(out + narrow_at, (passed * up).to(kind), there)
    tl.store(slopes + at, of_gate, there)
    tl.store(slopes + at + columns, of_up, there)
    largest = tl.maximum(tl.abs(of_gate.to(tl.float32)), tl.abs(of_up.to(tl.float32)))
    tl.store(most + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(largest))


def forward(raw, low, gate_factor, up_factor):
    """See `gated._forward`."""
    rows, columns, rank = len(raw), len(gate_factor), gate_factor.shape[1]
    out = raw.new_empty(rows, columns)
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS))
    most = raw.new_empty(grid[0] * grid[1], dtype=torch.float32)
    _forward[grid](
        raw, low, gate_factor, up_factor, out, most, rows, columns, rank,
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=max(16, triton.next_power_of_2(rank)), num_warps=_WARPS,
    )  # fmt: skip
    return out, most.amax()


def backward(raw, low, gate_factor, up_factor, raw_slope, thin_slope, down_factor):
    """See `gated._backward`."""
    rows, columns, rank = len(raw), len(gate_factor), gate_factor.shape[1]
    slopes, out = torch.empty_like(raw), raw.new_empty(rows, columns)
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS))
    most = raw.new_empty(grid[0] * grid[1], dtype=torch.float32)
    _backward[grid](
        raw, low, gate_factor, up_factor, raw_slope, thin_slope, down_factor, slopes, out, most, rows, columns, rank,
        ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=max(16, triton.next_power_of_2(rank)), num_warps=_WARPS,
    )  # fmt: skip
    return slopes, out, most.amax()


@triton.jit
def _gated(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _largest_gated(gate, up, most, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < count
    found = _gated(tl.load(gate + at, there, 0.0).to(tl.float32), tl.load(up + at, there, 0.0).to(tl.float32))
    tl.store(most + tl.program_id(0), tl.max(tl.abs(found)))


@triton.jit
def _round_gated(gate, up, factor, out, count, MOST: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < count
    found = _gated(tl.load(gate + at, there, 0.0).to(tl.float32), tl.load(up + at, there, 0.0).to(tl.float32))
    tl.store(out + at, _rounded(found, tl.load(factor), MOST).to(out.dtype.element_ty), there)


@triton.jit
def _rounded(value, factor, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(value / factor, -MOST), MOST)


@triton.jit
def _slopes(gate, up, slope):
    opened = tl.sigmoid(gate)
    passed = gate * opened
    return slope * up * (opened + passed * (1.0 - opened)), slope * passed, passed * up


@triton.jit
def _largest_slopes(gate, up, slope, most, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < count
    of_gate, of_up, _ = _slopes(
        tl.load(gate + at, there, 0.0).to(tl.float32),
        tl.load(up + at, there, 0.0).to(tl.float32),
        tl.load(slope + at, there, 0.0).to(tl.float32),
    )
    tl.store(most + tl.program_id(0), tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up))))


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = (r < rows)[:, None] & (c < columns)[None, :]
    return r[:, None] * columns + c[None, :], c[None, :] * rows + r[:, None], there


@triton.jit
def _round_slopes(gate, up, slope, factor, inner_factor, of_gate, of_up, of_gate_turned, of_up_turned, inner_turned,
                  rows, columns, MOST: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    at, turned, there = _tile(rows, columns, ROWS, COLUMNS)
    g, u, inner = _slopes(
        tl.load(gate + at, there, 0.0).to(tl.float32),
        tl.load(up + at, there, 0.0).to(tl.float32),
        tl.load(slope + at, there, 0.0).to(tl.float32),
    )
    g = _rounded(g, tl.load(factor), MOST).to(of_gate.dtype.element_ty)
    u = _rounded(u, tl.load(factor), MOST).to(of_gate.dtype.element_ty)
    inner = _rounded(inner, tl.load(inner_factor), INNER).to(inner_turned.dtype.element_ty)
    tl.store(of_gate + at, g, there)
    tl.store(of_up + at, u, there)
    tl.store(of_gate_turned + turned, g, there)
    tl.store(of_up_turned + turned, u, there)
    tl.store(inner_turned + turned, inner, there)


@triton.jit
def _round_both(value, factor, out, out_turned, rows, columns,
                MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    at, turned, there = _tile(rows, columns, ROWS, COLUMNS)
    found = _rounded(tl.load(value + at, there, 0.0).to(tl.float32), tl.load(factor), MOST).to(out.dtype.element_ty)
    tl.store(out + at, found, there)
    tl.store(out_turned + turned, found, there)


@triton.jit
def _turn(value, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, turned, there = _tile(rows, columns, ROWS, COLUMNS)
    tl.store(out + turned, tl.load(value + at, there), there)


_SIZE, _SIZE_WARPS = 4096, 8
_TURNED = (128, 64, 8)
"""Rows, columns and warps of a tile that is also written by columns."""


def _line(count):
    return (triton.cdiv(count, _SIZE),)


def _tiles(rows, columns):
    return (triton.cdiv(columns, _TURNED[1]), triton.cdiv(rows, _TURNED[0]))


def round_gated(gate, up, kind, least):
    count, grid = gate.numel(), _line(gate.numel())
    most, out = gate.new_empty(grid, dtype=torch.float32), torch.empty_like(gate, dtype=kind)
    _largest_gated[grid](gate, up, most, count, SIZE=_SIZE, num_warps=_SIZE_WARPS)
    end = torch.finfo(kind).max
    factor = most.amax().clamp_(min=least).div_(end)
    _round_gated[grid](gate, up, factor, out, count, MOST=end, SIZE=_SIZE, num_warps=_SIZE_WARPS)
    return out, factor


def round_slopes(gate, up, slope, inner_factor, kinds, least):
    (rows, columns), count, grid = gate.shape, gate.numel(), _line(gate.numel())
    kind, inner_kind = kinds
    most = gate.new_empty(grid, dtype=torch.float32)
    _largest_slopes[grid](gate, up, slope, most, count, SIZE=_SIZE, num_warps=_SIZE_WARPS)
    end = torch.finfo(kind).max
    factor = most.amax().clamp_(min=least).div_(end)
    plain = [torch.empty_like(gate, dtype=kind) for _ in range(2)]
    turned = [gate.new_empty(columns, rows, dtype=each) for each in (kind, kind, inner_kind)]
    _round_slopes[_tiles(rows, columns)](
        gate, up, slope, factor, inner_factor, *plain, *turned, rows, columns,
        MOST=end, INNER=torch.finfo(inner_kind).max, ROWS=_TURNED[0], COLUMNS=_TURNED[1], num_warps=_TURNED[2],
    )  # fmt: skip
    return *plain, *turned, factor


def round_both(value, factor, kind):
    rows, columns = value.shape
    out, turned = torch.empty_like(value, dtype=kind), value.new_empty(columns, rows, dtype=kind)
    _round_both[_tiles(rows, columns)](
        value, factor, out, turned, rows, columns,
        MOST=torch.finfo(kind).max, ROWS=_TURNED[0], COLUMNS=_TURNED[1], num_warps=_TURNED[2],
    )  # fmt: skip
    return out, turned


def turn(value):
    rows, columns = value.shape
    out = value.new_empty(columns, rows)
    _turn[_tiles(rows, columns)](
        value.view(torch.uint8), out.view(torch.uint8), rows, columns, ROWS=_TURNED[0], COLUMNS=_TURNED[1], num_warps=_TURNED[2]
    )
    return out
