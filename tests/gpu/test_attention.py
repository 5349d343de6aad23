"""Documents of one row do not see each other on a GPU either, where flex_attention keeps them apart."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from tests.recipes.llm import packed
from worldsize.recipes.llm import attention, data, shape
from worldsize.recipes.llm.model import Decoder, Ways

if TYPE_CHECKING:
    from pathlib import Path

GPU = torch.device("cuda")
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 5e-2}
"""float32 may be multiplied as TF32; a position that sees another document is off by tenths."""

pytestmark = [
    pytest.mark.gpu(count=1),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


def test_packed_rows_take_flex_here() -> None:
    """Without being asked for: what is compared below is what a training runs."""
    view = attention.kernel("auto", GPU, 64).view(packed.LENGTH, packed.documents(GPU), GPU)
    assert isinstance(view, attention.Blocks)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("window", packed.WINDOWS)
def test_flex_gives_what_each_document_gives_alone(window: int | None, size: int, dtype: torch.dtype) -> None:
    """Against plain matrix products: forward and gradients, grouped heads, rows that are no multiple of a block."""
    given, where = packed.operands(GPU, size, dtype), packed.documents(GPU)
    found = packed.attended(attention.Flexible(), given, where, window)
    wanted = packed.one_by_one(attention.Scaled("math"), [each.float() for each in given], where, window)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name].float(), value, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] * float(value.abs().max())
        )


@pytest.mark.parametrize("window", packed.WINDOWS)
def test_flex_gives_what_a_mask_gives(window: int | None) -> None:
    """The masked kernel of a CPU, on the same packed rows."""
    given, where = packed.operands(GPU, 64, torch.float32), packed.documents(GPU)
    found = packed.attended(attention.Flexible(), given, where, window)
    cpu = torch.device("cpu")
    wanted = packed.attended(attention.Scaled("math"), [each.cpu() for each in given], where.to(cpu), window)
    for name, value in wanted.items():
        bound = BOUNDS[torch.float32]
        torch.testing.assert_close(found[name].cpu(), value, rtol=bound, atol=bound * float(value.abs().max()))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("window", [None, 9])
def test_packed_rows_give_each_sample_the_same_loss(tmp_path: Path, window: int | None) -> None:
    """A whole decoder by the kernels that auto takes: packed by flex, not packed by scaled_dot_product_attention."""
    from tests.recipes.llm import folders

    model = folders.folder(tmp_path / "model", "mistral", sliding_window=window, head_dim=16)
    records = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(20)]
    path = folders.lines(tmp_path / "d.jsonl", records)
    decoder = Decoder(shape.read(tmp_path / "model"), Ways(attention.kernel("auto", GPU, 16))).eval()
    decoder.load_state_dict(model.state_dict())
    decoder.to(GPU)
    sums = []
    for packing in (True, False):
        wanted = data.Wanted(length=48, packed=packing)
        found = data.rows_of(
            path, tmp_path / "model", wanted, vocabulary=264, cache=tmp_path / "cache", say=lambda _: None
        )
        sums.append(packed.sample_losses(decoder, found, GPU))
    assert sums[0] == pytest.approx(sums[1], rel=5e-3)
