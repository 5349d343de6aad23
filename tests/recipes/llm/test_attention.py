"""Documents of one row do not see each other, in any kernel: forward and backward are those of each by itself."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.llm import packed
from worldsize.recipes.llm import attention

CPU = torch.device("cpu")


@pytest.fixture
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> attention.Flexible:
    """flex_attention as torch's own operations, which on CPU it computes if it is not asked where it is."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled", [flex.flex_attention])
    return attention.Flexible()


@pytest.mark.parametrize("window", packed.WINDOWS)
@pytest.mark.parametrize("name", ["math", "sdpa"])
def test_packed_documents_are_attended_as_each_alone(name: str, window: int | None) -> None:
    """Grouped heads, with a window and without."""
    given, where = packed.operands(CPU, 8, torch.float64), packed.documents(CPU)
    found = packed.attended(attention.Scaled(name), given, where, window)
    wanted = packed.one_by_one(attention.Scaled("math"), given, where, window)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [True, False], ids=["packed", "whole"])
@pytest.mark.parametrize("window", packed.WINDOWS)
def test_the_masks_for_flex_are_those_of_sdpa(
    plain_flex: attention.Flexible, window: int | None, *, documents: bool
) -> None:
    """What it may see, computed here by torch's operations; tests/gpu has the kernel itself."""
    given, where = packed.operands(CPU, 8, torch.float32), packed.documents(CPU) if documents else None
    found = packed.attended(plain_flex, given, where, window)
    wanted = packed.attended(attention.Scaled("math"), given, where, window)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
