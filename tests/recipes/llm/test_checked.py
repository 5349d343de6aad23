"""Kernels are compared with torch's operations before they are used."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worldsize.recipes.llm import checked

CPU = torch.device("cpu")


def twice(value: Tensor) -> Tensor:
    """What torch gives."""
    return 2 * value


def chosen(monkeypatch: pytest.MonkeyPatch, kernel: object) -> object:
    """What is used where this is the kernel."""
    kernels = ModuleType("worldsize.recipes.llm.kernels")
    kernels.twice = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr("worldsize.recipes.llm.kernels", kernels, raising=False)
    return made().chosen(CPU, (9,))


def made() -> checked.Checked[Tensor]:
    """Of numbers, as many as the key says."""
    return checked.Checked(
        "twice", twice, lambda value: value.shape, lambda drawn, key: (torch.randn(key, generator=drawn),)
    )


def test_one_that_gives_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what lies between two values of eight bits."""

    def near(value: Tensor) -> Tensor:
        return 2.001 * value

    assert chosen(monkeypatch, near) is near


@pytest.mark.parametrize("off", [float("nan"), float("inf"), 2.1])
def test_one_that_gives_other_numbers_is_told_and_left(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    """In its place torch's operations are used."""
    with pytest.warns(UserWarning, match=r"in place of the kernel 'twice': it gives other numbers"):
        assert chosen(monkeypatch, lambda value: off * value) is twice


def test_without_triton_torchs_operations_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is said."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="ModuleNotFoundError: .*triton"):
        assert made().chosen(CPU, (9,)) is twice


def test_one_that_does_not_compile_is_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its error's last line."""

    def broken(_: Tensor) -> Tensor:
        raise RuntimeError("at 3:7:\nout of shared memory")

    with pytest.warns(UserWarning, match="'twice': RuntimeError: out of shared memory"):
        assert chosen(monkeypatch, broken) is twice


@pytest.mark.parametrize("value", [1.0, -3.0])
def test_a_few_wrong_numbers_are_seen(value: float) -> None:
    """Among many right ones."""
    wanted = torch.ones(100_000)
    found = wanted.clone()
    found[7] = value
    assert checked.same(found, wanted) == (value == 1.0)


def test_each_way_to_compile_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is another one for other operands."""
    tried: list[int] = []

    def kernel(value: Tensor) -> Tensor:
        tried.append(len(value))
        return 2 * value

    monkeypatch.setattr(sys.modules[__name__], "made", cache(made))
    for length in (9, 16, 9):
        chosen(monkeypatch, kernel)
        made().chosen(CPU, (length,))
    assert tried == [9, 16]


@given(count=st.integers(1, 10_000))
def test_small_numbers_stand_for_large_ones(count: int) -> None:
    """1 is 1, and multiples of 16 are such."""
    small = checked.alike(count)
    assert (small == 1, small % 16 == 0) == (count == 1, count % 16 == 0)
    assert small < 200


def test_operations_are_exact_under_autocast() -> None:
    """What they compute in float32 stays in it."""
    value = torch.randn(8, 8)
    square = checked.Checked("square", lambda each: each @ each, lambda each: each.shape, lambda *_: (value,))
    wanted = value @ value
    with torch.autocast("cpu", torch.bfloat16):
        assert (value @ value).dtype is torch.bfloat16
        assert torch.equal(square(value), wanted)
