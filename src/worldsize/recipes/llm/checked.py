"""Room: kernels beside the operations of torch that they stand for: compared once on each machine, before they are used.

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
_NEAR = 0.04
"""Of what torch gives, by norm: values that lie between two of eight bits go to either, others to the same."""


class Checked(Generic[Found]):
    """An operation of torch, and on CUDA the kernel of its name where that gives the same.

    Args:
        name: in `kernels`.
        plain: torch's.
        example: draws operands to compare both by: of sizes that end within a tile.
    """

    def __init__(
        self, name: str, plain: Callable[..., Found], example: Callable[[torch.Generator], tuple[Tensor, ...]]
    ) -> None:
        self._name, self._plain, self._example = name, plain, example
        self._chosen: Callable[..., Found] | None = None

    def __call__(self, *operands: Tensor) -> Found:
        """Of the operands, as torch's."""
        if self._chosen is None and operands[0].is_cuda:
            self._chosen = self._choose(operands[0].device)
        with torch.autocast(operands[0].device.type, enabled=False):
            return (self._chosen or self._plain)(*operands)

    def _choose(self, device: torch.device) -> Callable[..., Found]:
        try:
            import triton

            from worldsize.recipes.llm import kernels
        except ImportError as error:
            return self._warned(f"Triton cannot be imported ({error})")
        kernel: Callable[..., Found] = getattr(kernels, self._name)
        operands = self._example(torch.Generator(device).manual_seed(0))
        if same(kernel(*operands), self._plain(*operands)):
            return kernel
        return self._warned(f"Triton {triton.__version__} makes another operation of it here")

    def _warned(self, why: str) -> Callable[..., Found]:
        warnings.warn(f"worldsize: torch's operations in place of the kernel {self._name!r}: {why}", stacklevel=4)
        return self._plain


def same(found: Any, wanted: Any) -> bool:
    """Whether each tensor is finite, and near the other."""
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
    return all(
        bool(
            mine.float().isfinite().all() and (mine.float() - theirs.float()).norm() <= _NEAR * theirs.float().norm()
        )
        for mine, theirs in pairs
    )
