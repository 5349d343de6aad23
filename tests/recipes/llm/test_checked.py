"""Kernels are compared with torch's operations before they are used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from worldsize.recipes.llm import checked

CPU = torch.device("cpu")


def twice(value: Tensor) -> Tensor:
    """What torch gives."""
    return 2 * value


def chosen(monkeypatch: pytest.MonkeyPatch, kernel: object) -> object:
    """What is used where this is the kernel."""
    kernels, triton = ModuleType("worldsize.recipes.llm.kernels"), ModuleType("triton")
    kernels.twice, triton.__version__ = kernel, "9.9"  # type: ignore[attr-defined]
    for name, module in ((kernels.__name__, kernels), ("triton", triton)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("worldsize.recipes.llm.kernels", kernels, raising=False)
    made = checked.Checked("twice", twice, lambda drawn: (torch.randn(9, generator=drawn),))
    return made._choose(CPU)


def test_one_that_gives_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what lies between two values of eight bits."""

    def near(value: Tensor) -> Tensor:
        return 2.001 * value

    assert chosen(monkeypatch, near) is near


@pytest.mark.parametrize("off", [float("nan"), float("inf"), 2.1])
def test_one_that_gives_other_numbers_is_told_and_left(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    """In its place torch's operations are used."""
    with pytest.warns(UserWarning, match=r"in place of the kernel 'twice': Triton 9\.9 makes another operation"):
        assert chosen(monkeypatch, lambda value: off * value) is twice


def test_without_triton_torchs_operations_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is said."""
    monkeypatch.setitem(sys.modules, "triton", None)
    made = checked.Checked("twice", twice, lambda drawn: (torch.randn(9, generator=drawn),))
    with pytest.warns(UserWarning, match="Triton cannot be imported"):
        assert made._choose(CPU) is twice


def test_operations_are_exact_under_autocast() -> None:
    """What they compute in float32 stays in it."""
    value = torch.randn(8, 8)
    made = checked.Checked("square", lambda each: each @ each, lambda _: (value,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(value), value @ value) is False
        assert made(value).dtype is torch.float32
