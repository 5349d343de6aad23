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
