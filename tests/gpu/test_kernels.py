"""Kernels on a GPU give what torch's operations give: rows and columns that end within a tile, and both ways alike."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from worldsize.recipes.llm import gated, tensorwise
from worldsize.recipes.llm.checked import Checked, same

OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
CHECKED = {
    each._name: each for module in (gated, tensorwise) for each in vars(module).values() if isinstance(each, Checked)
}

pytestmark = [
    pytest.mark.gpu(count=1),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(OLD, reason="needs compute capability 8.9"),
]


@pytest.mark.parametrize("name", CHECKED)
def test_each_gives_what_torch_gives(name: str) -> None:
    """By the operands that it is checked with, and found good: nothing is warned of."""
    made = CHECKED[name]
    operands = made._example(torch.Generator("cuda").manual_seed(1))
    assert same(made(*operands), made._plain(*operands))
    assert made._chosen is not made._plain


@pytest.mark.parametrize("shape", [(1024, 14336), (1000, 4096), (4096, 400), (16, 16)])
def test_what_is_written_both_ways_is_the_same(shape: tuple[int, int]) -> None:
    """Bit by bit, and near what torch gives."""
    torch.manual_seed(0)
    gate, up, slope = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    factor = torch.tensor(0.02, device="cuda")
    found = tensorwise._CLOSED(gate, up, slope, factor)
    assert same(found, tensorwise._closed_plain(gate, up, slope, factor))
    rounded = tensorwise._ROUNDED_BOTH(gate, factor / 100)
    for plain, turned in ((found[0], found[2]), (found[1], found[3]), rounded):
        assert torch.equal(plain.view(torch.uint8).t(), turned.view(torch.uint8))


@pytest.mark.parametrize("rank", [1, 8, 16, 24])
@pytest.mark.parametrize("shape", [(1000, 14336), (70, 176)])
def test_adapters_of_any_rank_are_added(shape: tuple[int, int], rank: int) -> None:
    """Forward and backward."""
    torch.manual_seed(0)
    rows, inner = shape
    sizes = (
        (rows, 2 * inner),
        (rows, 2 * rank),
        (inner, rank),
        (inner, rank),
        (rows, inner),
        (rows, rank),
        (rank, inner),
    )
    operands = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    assert same(gated._OPENED(*operands[:4]), gated._opened_plain(*operands[:4]))
    assert same(gated._CLOSED(*operands), gated._closed_plain(*operands))


@pytest.mark.parametrize("off", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(3))
def test_what_is_no_number_is_not_hidden(which: int, off: float) -> None:
    """Clamping would make a number of it. By the factor it comes into all of the product, as without kernels."""
    operands = [torch.randn(100, 200, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    operands[which][7, 9] = off
    factor = torch.tensor(0.02, device="cuda")
    assert not tensorwise._CLOSED(*operands, factor)[-1].isfinite()
    if which < 2:
        assert not tensorwise._OPENED(*operands[:2])[-1].isfinite()
    thin, low = (torch.randn(100, each, device="cuda", dtype=torch.bfloat16) for each in (8, 16))
    gate_up, up_up = (torch.randn(200, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    down = torch.randn(8, 200, device="cuda", dtype=torch.bfloat16)
    wide = torch.cat(operands[:2], -1), low, gate_up, up_up
    assert not gated._CLOSED(*wide, operands[2], thin, down)[-1].isfinite()
