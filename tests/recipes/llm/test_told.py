"""Which attention kernel runs, and what is said of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.recipes.llm import folders
from worldsize.errors import ConfigError
from worldsize.recipes.llm import attention, impl
from worldsize.recipes.llm.config import LLMConfig

if TYPE_CHECKING:
    from pathlib import Path

HEADS = attention.Heads(4, 2, 32)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def told(name: str, *, packed: bool = False) -> str:
    """Of a kernel for CPUs."""
    return attention.told(attention.kernel(name, CPU, HEADS.size), HEADS, CPU, torch.float32, packed=packed)


def test_what_torch_chooses_is_told() -> None:
    """By a person it was only left to torch."""
    assert told("auto") == "sdpa (flash)"
    with sdpa_kernel([SDPBackend.MATH]):
        assert told("auto") == "sdpa (math)"


def test_a_kernel_that_was_named_is_told_by_its_name() -> None:
    """Once."""
    assert told("math") == "math"


@pytest.mark.parametrize("name", ["auto", "flash", "flex"])
def test_rows_of_several_documents_have_another_kernel_on_gpus(name: str) -> None:
    """Where they would need a mask in memory, or a kernel takes none."""
    assert attention.told(attention.kernel(name, CUDA, 64), HEADS, CUDA, torch.bfloat16, packed=True) == "flex"


def test_a_kernel_that_cannot_is_refused() -> None:
    """Where torch finds none it raises."""
    with pytest.raises(ConfigError, match="attention=cudnn does not compute these heads"):
        attention.told(attention.Scaled("cudnn"), HEADS, CPU, torch.float32, packed=False)


def test_a_mask_belongs_to_what_a_kernel_cannot() -> None:
    """For windows, or positions that lie apart: it is named with the rest."""
    with pytest.raises(ConfigError, match="with a mask"):
        attention.told(attention.Scaled("cudnn"), HEADS, CPU, torch.float32, packed=False, masked=True)


@pytest.mark.parametrize(
    ("more", "refused"), [({"packing": False}, True), ({}, False), ({"packing": False, "max_seq_len": 8}, False)]
)
def test_flash_is_refused_where_it_would_meet_windows(tmp_path: Path, more: dict[str, Any], *, refused: bool) -> None:
    """It takes no masks; packed rows have another kernel, and rows no longer than the window need none."""
    folders.folder(tmp_path, "mistral", sliding_window=8, head_dim=16)
    with pytest.raises(ConfigError, match="flash computes no windows") if refused else nullcontext():
        impl.chosen(LLMConfig.of({"attention": "flash", **more}), tmp_path, CUDA)
