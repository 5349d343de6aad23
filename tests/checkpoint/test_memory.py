"""The host memory of a save: one part for each piece, registered with a device area by area."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldsize.checkpoint import memory
from worldsize.checkpoint.memory import HostMemory

DEVICE = torch.device("cuda", 1)


class Driver:
    """Stands for CUDA: what is registered with it, and when it refuses."""

    def __init__(self, patch: pytest.MonkeyPatch, most: int = 1000) -> None:
        self.registered: list[int] = []
        self.most = most
        calls = SimpleNamespace(cudaHostRegister=self.take, cudaHostUnregister=self.registered.remove)
        patch.setattr(torch.cuda, "cudart", lambda: calls)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(memory, "_AREA", 1 << 12)

    def take(self, address: int, size: int, _: int) -> int:
        """Register, or an error code."""
        assert size > 0
        if len(self.registered) >= self.most:
            return 1
        self.registered.append(address)
        return 0


@given(st.lists(st.integers(0, 9000), max_size=12))
def test_each_piece_has_memory_of_its_own(sizes: list[int]) -> None:
    """Whatever their sizes: aligned, apart, and as large as was asked for."""
    with pytest.MonkeyPatch.context() as patch:
        driver = Driver(patch)
        made = HostMemory(sizes, DEVICE)
        assert [piece.numel() for piece in made.pieces] == sizes
        assert made.pinned is bool(sum(sizes))
        for index, piece in enumerate(made.pieces):
            assert piece.numel() == 0 or piece.data_ptr() % 64 == 0
            piece.fill_(index)
        assert all((piece == index).all() for index, piece in enumerate(made.pieces))
        made.close()
        assert driver.registered == []


def test_a_large_piece_lies_in_one_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy over the border of two would not be one of registered memory."""
    driver = Driver(monkeypatch)
    made = HostMemory([3000, 3000, 50_000, 10], DEVICE)
    assert len(driver.registered) == 4
    made.close()


def test_memory_that_cannot_be_registered_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a part of it either: copies of that would wait."""
    driver = Driver(monkeypatch, most=1)
    made = HostMemory([3000, 3000, 3000], DEVICE)
    assert not made.pinned
    made.close()
    assert driver.registered == []


def test_what_was_registered_before_an_error_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that goes away registered is taken for what comes to its place."""
    driver, areas = Driver(monkeypatch), memory._area

    def short(size: int) -> torch.Tensor:
        if len(driver.registered) == 2:
            raise MemoryError
        return areas(size)

    monkeypatch.setattr(memory, "_area", short)
    with pytest.raises(MemoryError):
        HostMemory([3000, 3000, 3000], DEVICE)
    assert driver.registered == []
