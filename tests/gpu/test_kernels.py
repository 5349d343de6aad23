"""Kernels on a GPU give what torch's operations give: for all sizes, both ways alike, and with what is no number."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from worldsize.recipes.llm import gated, rotary, tensorwise
from worldsize.recipes.llm.checked import Checked, same

OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
CHECKED = {
    each.name: each for module in (gated, tensorwise) for each in vars(module).values() if isinstance(each, Checked)
}

pytestmark = [
    pytest.mark.gpu(count=1),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(OLD, reason="needs compute capability 8.9"),
]


def drawn(*shape: int) -> torch.Tensor:
    """Normal numbers of sixteen bits."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def by_kernel(made: Checked[Any], *operands: torch.Tensor) -> Any:
    """What it gives: not torch's operations, which would be taken where it is found wrong, with a warning."""
    found = made(*operands)
    assert made.chosen(operands[0].device, made.key(*operands)) is not made.plain
    return found


@pytest.mark.parametrize("key", [(144, 144), (100, 144), (1, 144)])
@pytest.mark.parametrize("name", CHECKED)
def test_each_gives_what_torch_gives(name: str, key: tuple[int, int]) -> None:
    """By other numbers than it is checked with."""
    made = CHECKED[name]
    operands = made.example(torch.Generator("cuda").manual_seed(1), key)
    assert same(by_kernel(made, *operands), made.plain(*operands))


@pytest.mark.parametrize("shape", [(1024, 14336), (1008, 4096), (4096, 400), (16, 16)])
def test_what_is_written_both_ways_is_the_same(shape: tuple[int, int]) -> None:
    """Bit by bit, and near what torch gives."""
    torch.manual_seed(0)
    gate, up, slope = (drawn(*shape) for _ in range(3))
    factor = torch.tensor(0.02, device="cuda")
    found = by_kernel(tensorwise._CLOSED, gate, up, slope, factor)
    assert same(found, tensorwise._closed_plain(gate, up, slope, factor))
    rounded = by_kernel(tensorwise._ROUNDED_BOTH, gate, factor / 100)
    for plain, turned in ((found[0], found[2]), (found[1], found[3]), rounded):
        assert torch.equal(plain.view(torch.uint8).t(), turned.view(torch.uint8))


@pytest.mark.parametrize("rank", [1, 8, 16, 24, 64])
@pytest.mark.parametrize("shape", [(1000, 14336), (70, 176), (1, 64)])
def test_adapters_of_any_rank_are_added(shape: tuple[int, int], rank: int) -> None:
    """Forward and backward."""
    torch.manual_seed(0)
    rows, inner = shape
    raw, low, gate_up, up_up = drawn(rows, 2 * inner), drawn(rows, 2 * rank), drawn(inner, rank), drawn(inner, rank)
    sent, thin, down = drawn(rows, inner), drawn(rows, rank), drawn(rank, inner)
    found, wanted = by_kernel(gated._OPENED, raw, low, gate_up, up_up), gated._opened_plain(raw, low, gate_up, up_up)
    assert same(found, wanted)
    found = by_kernel(gated._CLOSED, raw, low, gate_up, up_up, sent, thin, down)
    assert same(found, gated._closed_plain(raw, low, gate_up, up_up, sent, thin, down))


@pytest.mark.filterwarnings("ignore:worldsize. torch's operations")
def test_a_rank_that_is_too_large_is_left_to_torch() -> None:
    """Its factors do not fit a program's memory: no error, a warning."""
    operands = drawn(64, 128), drawn(64, 4096), drawn(64, 2048), drawn(64, 2048)
    assert same(gated._OPENED(*operands), gated._opened_plain(*operands))


@pytest.mark.parametrize("off", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", range(3))
def test_what_is_no_number_is_not_hidden(which: int, off: float) -> None:
    """Clamping would make a number of it. By the factor it comes into all of the product, as without kernels."""
    operands = [drawn(112, 208) for _ in range(3)]
    operands[which][7, 9] = off
    factor = torch.tensor(0.02, device="cuda")
    assert not by_kernel(tensorwise._CLOSED, *operands, factor)[-1].isfinite()
    if which < 2:
        assert not by_kernel(tensorwise._FACTOR, *operands[:2]).isfinite()
    wide = torch.cat(operands[:2], -1), drawn(112, 16), drawn(208, 8), drawn(208, 8)
    assert not by_kernel(gated._CLOSED, *wide, operands[2], drawn(112, 8), drawn(8, 208))[-1].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("wide", [True, False])
def test_heads_turn_as_by_torch(dtype: torch.dtype, tables: int, *, wide: bool) -> None:
    """Also those that are cut out of a wider row; the way back turns them back."""
    torch.manual_seed(0)
    row = torch.randn(2, 48, 5 * 64, device="cuda", dtype=dtype, requires_grad=True)
    heads = row[..., : 3 * 64].view(2, 48, 3, 64)
    angles = torch.rand(tables, 48, 1, 32, device="cuda").repeat(1, 1, 1, 2)
    kind = torch.float32 if wide else dtype
    turn = angles.cos().to(kind), angles.sin().to(kind)
    assert rotary._ROTATED.chosen(heads.device, rotary._key(heads, *turn)) is not rotary._ROTATED.plain
    sent = torch.randn(heads.shape, device="cuda", dtype=dtype)
    found, wanted = rotary.in_one_pass(heads, *turn), rotary.rotate(heads, *turn).to(dtype)
    assert type(found.grad_fn).__name__ == "_RotationBackward"
    assert same(found, wanted)
    assert same(torch.autograd.grad(found, row, sent)[0], torch.autograd.grad(wanted, row, sent)[0])
