"""Room: which activations of a decoder's layers are held for the backward pass, and which are computed again. Knows no model.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (full); Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (selective: what is cheap to compute and large to hold is computed again).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from worldsize.recipes.llm.modes import NONE, SELECTIVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worldsize.recipes.llm.modes import Mode

Beside = Callable[[nn.Module], AbstractContextManager[None]]
_KEPT = (
    "aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten._scaled_dot_product_fused_attention_overrideable.default",
    "higher_order.flex_attention", "_c10d_functional.all_reduce.default", "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default",
    "worldsize.sum_of_products.default", "worldsize.sum_of_products_of_eight.default", "worldsize.gated_factor.default",
)  # fmt: skip
"""What is slow to compute again: projections, attention (the kernels that hold no scores), exchanges between ranks."""


class Recomputation:
    """How a placed model's layers are computed. Numbers do not depend on it: what is drawn is drawn again alike.

    Given to `Run.model` as activation_checkpointing; see `worldsize.strategies.base.Recompute`.

    Args:
        mode: to begin with.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._layers: list[_Layer] = []

    def __call__(self, blocks: Sequence[nn.Module], beside: Beside) -> None:
        """Stand in for the forward of each layer."""
        for index, block in enumerate(blocks):
            layer = _Layer(block, beside, self._mode.of(index))
            block.__dict__["forward"] = layer
            self._layers.append(layer)

    def take(self, mode: Mode) -> None:
        """Compute so from now on, between steps."""
        self._mode = mode
        for index, layer in enumerate(self._layers):
            layer.kind = mode.of(index)


class _Layer:
    """The forward of one layer. What is compiled looks at `kind` alone, so that all layers share it."""

    def __init__(self, block: nn.Module, beside: Beside, kind: str) -> None:
        self._block, self._beside, self.kind = block, beside, kind
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == NONE or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            contexts = partial(_contexts, self.kind, self._block, self._beside)
        elif self.kind == SELECTIVE:
            contexts = partial(create_selective_checkpoint_contexts, _policy)
        else:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(kind: str, block: nn.Module, beside: Beside) -> tuple[Any, Any]:
    """What stands around the first and the second pass."""
    if kind != SELECTIVE:
        return nullcontext(), beside(block)
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, _both(beside(block), second)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _kept() -> frozenset[Any]:
    """Of `_KEPT`, what this torch has."""
    import torch.nn.attention.flex_attention

    found = set()
    for path in _KEPT:
        operation: Any = torch.ops
        for name in path.split("."):
            operation = getattr(operation, name, None)
        found.add(operation)
    return frozenset(found - {None})
