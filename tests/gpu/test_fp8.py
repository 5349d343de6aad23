"""Projections in eight bits on GPUs that have them: a model learns as in bf16."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.test_llm import BOUNDS, SLOW, curve, place

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["place"]
LAYOUTS = {
    "single": (1, ["--compile", "true"]),
    "rowwise": (1, ["--compile", "true", "--fp8_scaling", "rowwise"]),
    "fsdp": (2, ["--compile", "true", "--strategy", "fsdp"]),
    "fsdp-held": (2, ["--strategy", "fsdp", "--reshard", "false"]),
}
MISSING = [name for name in ("transformers", "torchao") if importlib.util.find_spec(name) is None]
OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' '.join(MISSING)}"),
    pytest.mark.skipif(OLD, reason="needs compute capability 8.9"),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu(count=ranks)) for name, (ranks, _) in LAYOUTS.items()]
)
def test_it_learns_as_bf16_does(place: Path, name: str) -> None:
    """Each loss, within what rounding does to bf16 itself."""
    ranks, words = LAYOUTS[name]
    wanted = curve(place, "slow", "bf16", 1, *SLOW)
    assert wanted[5] < 0.9 * wanted[0]
    assert curve(place, f"eight-{name}", "fp8", ranks, *words, *SLOW) == pytest.approx(wanted, rel=BOUNDS["bf16"])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(f"adapters-{ranks}", ranks, marks=pytest.mark.gpu(count=ranks)) for ranks in (1, 2)],
)
def test_adapters_learn_beside_frozen_projections_as_in_bf16(place: Path, name: str, ranks: int) -> None:
    """Compiled, with what is cheap computed again."""
    words = ["--lora_rank", "4", "--compile", "true", "--activation_checkpointing", "selective"]
    wanted = curve(place, "adapters", "bf16", 1, *words)
    assert wanted[5] < 0.9 * wanted[0]
    assert curve(place, name, "fp8", ranks, *words) == pytest.approx(wanted, rel=BOUNDS["bf16"])
