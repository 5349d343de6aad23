"""Room: one model on parts of a sequence: each rank computes some of the positions, attention sees all of them. No batches.

Keys and values are gathered from the other parts (as in Llama 3's training: Dubey et al., "The Llama 3 Herd of Models", 2024,
section 3.3.2); everything else works on each position for itself. Whether that is true of a model is tried out once.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from worldsize.errors import LayoutError
from worldsize.strategies.base import brief
from worldsize.strategies.outputs import mapped, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from worldsize.strategies.routing import Entry

_POSITIONS = "position_ids"
"""The argument by which transformers' models are told where a part stands."""
_TRIED = 4
"""How many positions of each part are tried out."""
_DROPPING = (
    functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.rand_like, torch.randn_like, torch.bernoulli,
)  # fmt: skip


class Parts(TorchFunctionMode):
    """While it is entered, attention reaches over all parts, and drop-out is drawn for the whole sequence.

    Args:
        mesh: the ranks of the parts, of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._group = mesh.get_group()
        self.count, self.index = mesh.size(), mesh.get_local_rank()
        self.length = 0
        """Of a part."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is functional.dropout:
            return self._drop(*args, **kwargs)
        if func in _DROPPING and self._draws(args, kwargs):
            raise LayoutError(
                "random numbers of parts of a sequence would be another curve",
                found=f"{func.__name__}, cp={self.count}",
                do="use nn.Dropout, or no cp",
            )
        return func(*args, **kwargs)

    def cut(self, value: Tensor, length: int) -> Tensor:
        """This rank's part of what is as long as the sequence."""
        if value.dim() < 2 or value.shape[1] != length:  # noqa: PLR2004 - samples, then positions
            return value
        return value.narrow(1, self.index * self.length, self.length)

    def join(self, value: Tensor) -> Tensor:
        """The whole of what is as long as a part."""
        if value.dim() < 2 or value.shape[1] != self.length:  # noqa: PLR2004
            return value
        joined: Tensor = _Join.apply(value, self._group, self.count, self.index)  # type: ignore[no-untyped-call]
        return joined

    def _attend(  # noqa: PLR0917 - torch's own arguments
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or query.shape[-2] != self.length or key.shape[-2] != self.length:
            raise LayoutError(
                "attention over parts of a sequence is whole, or causal, without a mask and drop-out of its own",
                found=f"mask: {'yes' if attn_mask is not None else 'no'}, dropout_p={dropout_p}, lengths {query.shape[-2]} and "
                f"{key.shape[-2]} in a part of {self.length}",
                do="use is_causal=True and nn.Dropout, or no cp",
            )
        keys, values = (
            all_gather_tensor_autograd(each.contiguous(), each.dim() - 2, self._group) for each in (key, value)
        )
        if not is_causal:
            return functional.scaled_dot_product_attention(query, keys, values, **more)
        seen = (self.index + 1) * self.length
        return functional.scaled_dot_product_attention(
            query,
            keys.narrow(-2, 0, seen),
            values.narrow(-2, 0, seen),
            _after(self.length, seen, query, more),
            **more,
        )

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace
        if not training or not p:
            return x
        if x.dim() < 2 or x.shape[1] != self.length:  # noqa: PLR2004
            raise LayoutError(
                "drop-out of a part of a sequence wants positions in dimension 1",
                found=f"{tuple(x.shape)} in a part of {self.length}", do="lay them so, or use no cp",
            )  # fmt: skip
        whole = x.new_ones(x.shape[0], self.length * self.count, *x.shape[2:])
        return x * functional.dropout(whole, p).narrow(1, self.index * self.length, self.length)

    @staticmethod
    def _draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(kwargs.get("training", True)) and (len(args) < 3 or bool(args[2]))  # noqa: PLR2004


def _after(part: int, seen: int, query: Tensor, more: Mapping[str, Any]) -> Tensor:
    """The mask of the last positions of so many, each of which sees those before it."""
    if query.is_cuda and not more.get("enable_gqa"):
        last: Tensor = causal_lower_right(part, seen)  # kernels know it: nothing as large as part x seen is made
        return last
    places = torch.arange(seen, device=query.device)
    return places <= places[-part:].unsqueeze(1)


class _Join(torch.autograd.Function):
    """All parts, on each rank: every rank goes on with the same numbers, so the gradient of its part is a slice."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, count: int, index: int) -> Tensor:
        ctx.index, ctx.length = index, part.shape[1]
        found = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(count)]
        dist.all_gather(found, part.contiguous(), group=group)
        return torch.cat(found, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.narrow(1, ctx.index * ctx.length, ctx.length).contiguous(), None, None, None


class Parted:
    """The way into a model whose calls are computed in parts.

    Args:
        model: the user's.
        entry: the way in of its strategy.
        parts: this rank's.
    """

    def __init__(self, model: nn.Module, entry: Entry, parts: Parts) -> None:
        _refuse_batch_norm(model, parts)
        self._model, self._entry, self._parts = model, entry, parts
        self._signature = inspect.signature(model.forward)
        self._tried = False

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Through the strategy, on this rank's part of every argument; outputs come out whole."""
        if method not in ("__call__", "forward"):
            raise LayoutError(
                "a model in parts of a sequence is called, and its other methods are not",
                found=f"{method}, cp={self._parts.count}", do="move it into forward, or use no cp",
            )  # fmt: skip
        length = _length(args, kwargs)
        if not self._tried and length % self._parts.count == 0:
            self._tried = True
            self._try(method, args, kwargs, length)
        return self._call(method, args, kwargs, length)

    def _call(self, method: str, args: Any, kwargs: dict[str, Any], length: int) -> Any:
        parts = self._parts
        if length % parts.count:
            raise LayoutError(
                "the sequence does not divide over the ranks that share it",
                found=f"length {length}, cp={parts.count}", do="pad to a multiple of it",
            )  # fmt: skip
        args, kwargs = self._placed(args, kwargs, length)
        parts.length = length // parts.count
        args, kwargs = mapped(lambda value: parts.cut(value, length), (args, kwargs))
        with parts:
            output = self._entry(method, *args, **kwargs)
        return mapped(parts.join, output)

    def _placed(self, args: Any, kwargs: dict[str, Any], length: int) -> tuple[Any, dict[str, Any]]:
        """The arguments, with the positions where the model takes them and none were given, by place or by name."""
        if _POSITIONS not in self._signature.parameters:
            return args, kwargs
        given = self._signature.bind(*args, **kwargs)
        if given.arguments.get(_POSITIONS) is None:
            device = tensors((args, kwargs))[0].device
            given.arguments[_POSITIONS] = torch.arange(length, device=device).unsqueeze(0)
        return given.args, given.kwargs

    def _try(self, method: str, args: Any, kwargs: dict[str, Any], length: int) -> None:
        """Compute a few positions of one sample in parts and whole: what else looks along the sequence shows. Collective."""
        most = min(length, _TRIED * self._parts.count)
        few = mapped(lambda value: _few(value, length, most), (args, kwargs))
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.no_grad():
                found = tensors(self._call(method, few[0], few[1], most))
                wanted = tensors(self._entry(method, *few[0], **few[1]))
        finally:
            for module in training:
                module.training = True
        apart = max((_apart(one, other) for one, other in zip(found, wanted, strict=True)), default=0.0)
        if not apart <= _bound(wanted):
            raise LayoutError(
                "the model computes something else on parts of a sequence than on the whole",
                found=f"outputs {apart:.2g} apart, cp={self._parts.count}",
                do="give it positions as an input (samples, length) instead of counting them, let only attention "
                "(scaled_dot_product_attention) look along the sequence, or use no cp",
            )


def _length(args: Any, kwargs: Any) -> int:
    found = [value.shape[1] for value in tensors((args, kwargs)) if value.dim() > 1]
    if not found:
        raise LayoutError("there is no sequence to split", found="inputs without a second dimension", do="use no cp")
    return int(found[0])


def _few(value: Tensor, length: int, most: int) -> Tensor:
    return value[:1, :most] if value.dim() > 1 and value.shape[1] == length else value


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def _bound(values: list[Tensor]) -> float:
    coarse = max((torch.finfo(value.dtype).eps for value in values if value.is_floating_point()), default=0.0)
    return max(50 * coarse, 3e-2 if torch.is_autocast_enabled(values[0].device.type) else 0.0) if values else 0.0


def _refuse_batch_norm(model: nn.Module, parts: Parts) -> None:
    found = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if found:
        raise LayoutError(
            "batch normalisation over parts of a sequence would normalise each by itself",
            found=f"{brief(found)}, cp={parts.count}",
            do="use a norm of each position, or no cp",
        )
