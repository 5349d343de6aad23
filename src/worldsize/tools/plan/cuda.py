"""Room: what a GPU does where the CPU does otherwise: autocast's list, fused attention and dropout, multi-tensor optimizers.

Planned tensors are fake ones of the CPU, as builds without CUDA know no others. The rules are put into torch's dispatcher,
below the program, and hold for fake tensors only.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten
_LOW = (torch.bfloat16, torch.float16)
_MOST = 256
"""The largest head that flash attention has a kernel for."""

_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss",
    "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "soft_margin_loss",
    "triplet_margin_loss", "binary_cross_entropy_with_logits", "dist", "renorm", "logsumexp", "prod", "prod.dim_int",
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList",
    "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
"""What CUDA's autocast computes in float32 (torch's page on automatic mixed precision); the CPU's has fewer of them."""


class Rules:
    """The rules, for as long as the object lives."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for name in _FLOAT32:
            base, _, overload = name.partition(".")
            op = getattr(getattr(_aten, base), overload or "default")
            key = f"aten::{name}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(key, "AutocastCPU"):  # noqa: SLF001
                self._library.impl(name, partial(_wide, op), "AutocastCPU")
        self._library.impl("dropout", _dropout, "AutogradCPU")
        self._library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")


def many() -> None:
    """Optimizers treat fake tensors of the CPU as CUDA's: all of a group in one kernel, with its temporaries."""
    from torch.optim import optimizer

    def devices() -> list[str]:
        return ["cpu", "cuda"]

    for module in (_foreach_utils, optimizer):
        vars(module)["_foreach_supported_types"].append(FakeTensor)
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            vars(module)["_get_foreach_kernels_supported_devices"] = devices


def _wide(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As autocast does it: one copy in float32, which the backward pass then needs too."""

    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, FakeTensor) and value.dtype in _LOW else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):  # noqa: SLF001
        return op(*tree_map(cast, args), **tree_map(cast, kwargs))


def _dropout(value: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not isinstance(value, FakeTensor) or not train or not 0 < p < 1:
        found: torch.Tensor = _aten.dropout.default.decompose(value, p, train)
        return found
    result: torch.Tensor = _aten.native_dropout(value, p, train)[0]
    return result


def _attention(  # noqa: PLR0917 - as the dispatcher calls it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention in low precision, the memory-efficient kernel in float32 or under a mask, else all scores."""
    whole = query.dim() == 4 and isinstance(query, FakeTensor)  # noqa: PLR2004
    low = query.dtype in _LOW and query.shape[-1] <= _MOST
    found: torch.Tensor
    if whole and low and attn_mask is None and query.shape[-1] == value.shape[-1]:
        found = _aten._scaled_dot_product_flash_attention(  # noqa: SLF001
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return found
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    if whole and query.dtype is not torch.float64 and not grouped:
        bias = None
        if attn_mask is not None:
            bias = attn_mask.to(query.dtype) if attn_mask.dtype is torch.bool else attn_mask
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        trained = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        found = _aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, bias, trained, dropout_p, is_causal, scale=scale
        )[0]
        return found
    found = _aten.scaled_dot_product_attention.default.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found
