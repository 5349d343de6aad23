"""Room: kernels beside the operations of torch that they stand for: compared in each process, before they are used.

A kernel is compiled for the GPU and by the Triton that a user has, and one that is compiled wrongly raises nothing.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Found = TypeVar("Found")
Key = tuple[int, ...]
_NEAR, _STEP, _FLOOR = 0.02, 0.26, 1e-3
"""How far a result may be off: in all, by norm; each value, of itself (a step of e5m2) and of the largest."""


class Checked(Generic[Found]):
    """An operation of torch, and on CUDA the kernel of its name where that gives the same.

    Args:
        name: in `kernels`.
        plain: torch's.
        key: of operands: what decides how the kernel is compiled for them, see `alike`.
        example: draws small operands of that key, to compare both by.
    """

    def __init__(
        self,
        name: str,
        plain: Callable[..., Found],
        key: Callable[..., Key],
        example: Callable[[torch.Generator, Key], tuple[Tensor, ...]],
    ) -> None:
        self.name, self.plain, self.key, self.example = name, plain, key, example
        self._chosen: dict[tuple[Any, ...], Callable[..., Found]] = {}

    def __call__(self, *operands: Tensor) -> Found:
        """Of the operands, as torch's."""
        device = operands[0].device
        with torch.autocast(device.type, enabled=False):
            if device.type != "cuda":
                return self.plain(*operands)
            with torch.cuda.device(device):
                return self.chosen(device, self.key(*operands))(*operands)

    def chosen(self, device: torch.device, key: Key) -> Callable[..., Found]:
        """The kernel, or torch's operations: tried when first asked for."""
        where = device, key
        if where not in self._chosen:
            self._chosen[where] = self._choose(device, key)
        return self._chosen[where]

    def _choose(self, device: torch.device, key: Key) -> Callable[..., Found]:
        operands = self.example(torch.Generator(device).manual_seed(0), key)
        try:
            from worldsize.recipes.llm import kernels

            kernel: Callable[..., Found] = getattr(kernels, self.name)
            found = kernel(*operands)
        except Exception as error:  # noqa: BLE001 - no Triton, no C compiler, a GPU that it does not know or that is too small
            *_, last = str(error).strip().split("\n")
            return self._warned(f"{type(error).__name__}: {last}")
        if same(found, self.plain(*operands)):
            return kernel
        return self._warned("it gives other numbers here")

    def _warned(self, why: str) -> Callable[..., Found]:
        warnings.warn(f"worldsize: torch's operations in place of the kernel {self.name!r}: {why}", stacklevel=4)
        return self.plain


def alike(count: int) -> int:
    """A small number for which a kernel is compiled as for that: Triton looks whether one is 1, or a multiple of 16."""
    return 1 if count == 1 else 100 if count % 16 else 144


def same(found: Any, wanted: Any) -> bool:
    """Whether each tensor is that one, but for values that lie between two of eight bits and went to the other."""
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
    return all(_near(mine.float(), theirs.float()) for mine, theirs in pairs)


def _near(mine: Tensor, theirs: Tensor) -> bool:
    off = (mine - theirs).abs()  # where there is no number, nothing is at most
    return bool(
        (off <= _STEP * theirs.abs() + _FLOOR * theirs.abs().max()).all() and off.norm() <= _NEAR * theirs.norm()
    )
