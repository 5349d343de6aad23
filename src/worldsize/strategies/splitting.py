"""Room: one model's modules laid over tensor ranks by torch's parallel styles, and what keeps that exact. No plan, no steps.

What a plan leaves out is held and computed by every tensor rank alike. Three things would go wrong without a word, and
are looked for in the first step: drop-out that draws for a part only, gradients that are a part of the sum only, and
attention whose heads are cut in length instead of in number.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from worldsize.errors import ConfigError, LayoutError, StepError
from worldsize.runtime.sharded import is_sharded, local
from worldsize.strategies import tensorplan
from worldsize.strategies.base import brief
from worldsize.strategies.outputs import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from worldsize.strategies.base import Options
    from worldsize.strategies.routing import Entry
    from worldsize.strategies.tensorplan import Style

_SAME = 1e-4
"""Gradients that ranks computed alike may differ by so much: some kernels add in changing order."""
_DRAWING = {
    torch.rand_like: None, torch.randn_like: None, torch.bernoulli: None, torch.dropout: 1,
    functional.dropout: 1, functional.dropout1d: 1, functional.dropout2d: 1, functional.dropout3d: 1,
    functional.alpha_dropout: 1, functional.feature_alpha_dropout: 1, functional.scaled_dot_product_attention: 4,
    functional.rrelu: None, functional.gumbel_softmax: None,
}  # fmt: skip
"""Functions that draw in the shape of what they are given, and where their probability stands."""


class Split:
    """One model over the ranks of a tensor group.

    Args:
        model: as it was built, with or without memory.
        fill: gives memory and values to a module of it.
        options: `tp_plan` and `loss_parallel`.
        mesh: the tensor ranks, of one dimension.
        whole: see `tensorplan.resolve`.
    """

    def __init__(
        self, model: nn.Module, fill: Callable[[nn.Module], None], options: Options, mesh: DeviceMesh, *, whole: bool
    ) -> None:
        if options.compile:
            raise ConfigError(
                "compile= with tp: what torch makes of tensor ranks' collectives there gives another curve",
                found=f"compile={options.compile!r}, tp={mesh.size()}",
                do="leave compile out, or use fsdp",
            )
        plan = tensorplan.resolve(model, options.tp_plan, mesh.size(), whole=whole)
        self._model, self._filled, self._mesh = model, fill, mesh
        self._names = {module: name for name, module in model.named_modules()}
        self._styles = {model.get_submodule(name): style for name, style in plan.items()}
        self._ties, self._head_sizes = tensorplan.sharing(model), tensorplan.head_sizes(model, plan)
        self._done: set[nn.Module] = set()
        self._summed: list[tuple[nn.Module, str]] = []
        self._sharded_loss = options.loss_parallel
        self._open = ExitStack()
        self._looked = False

    def fill(self, unit: nn.Module) -> None:
        """Everything inside `unit`: values, and its place on the tensor ranks, module by module."""
        for module in list(unit.modules()):
            if module in self._styles and module not in self._done:
                self._lay(module)
        self._filled(unit)

    def open(self) -> None:
        """Before the first micro-batch: cross entropy is told of outputs that are split over classes."""
        self._open.close()
        if self._sharded_loss:
            self._open.enter_context(loss_parallel())
            self._open.enter_context(_Losses())

    def close(self) -> None:
        """After the last one: gradients are those of the whole model. Collective."""
        self._open.close()
        parts = [value.grad for value in self._of(self._summed) if value.grad is not None]
        if parts:
            flat = torch.cat([local(part).reshape(-1) for part in parts])
            dist.all_reduce(flat, group=self._mesh.get_group())
            for part, total in zip(parts, flat.split([local(part).numel() for part in parts]), strict=True):
                local(part).copy_(total.view_as(local(part)))
        for value in self._model.parameters():
            grad = value.grad
            if is_sharded(grad) and is_sharded(value) and any(each.is_partial() for each in grad.placements):
                value.grad = grad.redistribute(placements=value.placements)
        if not self._looked:
            self._looked = True
            self._refuse_partial()

    def guarded(self, entry: Entry) -> Entry:
        """The way into the model, watched until the first step is done."""

        def enter(method: str, *args: Any, **kwargs: Any) -> Any:
            if self._looked or not (self._model.training and torch.is_grad_enabled()):
                return entry(method, *args, **kwargs)
            with _Watch(self):
                return entry(method, *args, **kwargs)

        return enter

    def _lay(self, module: nn.Module) -> None:
        """Split a module, together with those that share a weight with it."""
        family = [module]
        for each in family:
            tied = [other for owners in self._ties if each in owners for other in owners]
            family += [other for other in dict.fromkeys(tied) if other not in family]
        outside = [self._names[other] for other in family if other not in self._styles]
        if outside:
            raise self._untied(module, outside)
        for each in family:
            self._filled(each)
        for each in family:
            self._done.add(each)
            self._apply(each, self._styles[each])
        for owners in self._ties:
            if owners.keys() & set(family):
                self._tie(owners)

    def _apply(self, module: nn.Module, style: Style) -> None:
        if isinstance(module, nn.Dropout) and (style in tensorplan.SUMMED or style == "colwise"):
            cut = _Slice(module, self._mesh, -1 if style == "colwise" else 1)
            module.forward = cut  # type: ignore[method-assign,assignment]
            return
        if style in tensorplan.SUMMED:
            self._summed += [(inner, name) for inner in module.modules() for name in inner._parameters]  # noqa: SLF001
        elif style != "replicate":
            trained = {name: value.requires_grad for name, value in module.named_parameters()}
            laid = self._torch(module, style)
            own = style in tensorplan.OWN  # which sees to all of its parameters
            beside = getattr(module, "tp_beside", {}).get(style) if isinstance(style, str) and not own else None
            parallelize_module(module, self._mesh, _Beside(laid, beside) if beside else laid, src_data_rank=None)
            for name, value in module.named_parameters():
                value.requires_grad_(trained[name])

    def _torch(self, module: nn.Module, style: Style) -> ParallelStyle:
        if isinstance(style, ParallelStyle):
            return style
        sequence = Shard(1) if style.endswith("_sequence") else Replicate()
        if style in ("gather_sequence", "entered_sequence", "entered"):
            return _Entered(sequence, summed=style != "gather_sequence")
        if style in tensorplan.OWN:
            dims = getattr(module, "tp_beside", {}).get("columns", {})
            return _Columns(dims, _Entered(sequence) if "entered" in style else None)
        if style in tensorplan.ROWS:
            if sequence.is_shard():
                module.register_forward_pre_hook(_Divides(self._names[module], self._mesh.size()))
            whole = isinstance(module, nn.Embedding) or style == "rowwise_whole"
            return RowwiseParallel(input_layouts=Replicate() if whole else Shard(-1), output_layouts=sequence)
        replicated = style.startswith("colwise_rep")
        if replicated and self._sharded_loss:
            kept = ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False)
            return _Both(kept)
        return ColwiseParallel(input_layouts=sequence, output_layouts=Replicate() if replicated else Shard(-1))

    def _tie(self, owners: dict[nn.Module, str]) -> None:
        (first, name), *others = owners.items()
        shared = first._parameters[name]  # noqa: SLF001
        for other, its in others:
            own = other._parameters[its]  # noqa: SLF001
            if is_sharded(own) != is_sharded(shared) or (
                is_sharded(own) and is_sharded(shared) and own.placements != shared.placements
            ):
                raise self._untied(first, [self._names[other]])
            other._parameters[its] = shared  # noqa: SLF001

    def _untied(self, module: nn.Module, others: list[str]) -> LayoutError:
        return LayoutError(
            "modules share a weight, and the tp plan lays it in two ways",
            found=f"{self._names[module]} and {brief(others)}",
            do="an embedding 'rowwise' and a head 'colwise_rep' fit together",
        )

    def _of(self, owned: list[tuple[nn.Module, str]]) -> Iterator[nn.Parameter]:
        for module, name in owned:
            value = module._parameters[name]  # noqa: SLF001 - sharding puts another one in its place
            if value is not None:
                yield value

    def _refuse_partial(self) -> None:
        """What every tensor rank computed alike must have come out alike."""
        alike = {
            name: value.grad
            for name, value in self._model.named_parameters()
            if value.grad is not None and not (is_sharded(value) and "tp" in (value.device_mesh.mesh_dim_names or ()))
        }
        if not alike:
            return
        apart = self._apart(torch.stack([_digest(local(grad)) for grad in alike.values()]))
        if any(apart):
            raise StepError(
                "parameters that the tp plan leaves whole got other gradients on other tensor ranks",
                found=brief([name for name, differs in zip(alike, apart, strict=True) if differs]),
                do="a module that works on a part of the sequence or of the heads is 'sequence' or 'summed' in the plan",
            )

    def differs(self, value: Tensor) -> bool:
        """Whether tensor ranks hold different values. Collective."""
        return self._apart(_digest(local(value))[None])[0]

    def refuse_short_heads(self, size: int) -> None:
        """Raises LayoutError where attention works with as many heads as the whole model has, each a part of one."""
        parts = self._mesh.size()
        if size not in self._head_sizes and size * parts in self._head_sizes:
            raise LayoutError(
                "under tp the model must have fewer heads, not shorter ones",
                found=f"attention over heads of {size}, of {size * parts} in one rank's model, tp={parts}",
                do="cut heads by their size: view(batch, length, -1, head_size)",
            )

    def _apart(self, digests: Tensor) -> list[bool]:
        """For each row (size, sum) whether tensor ranks differ in it. Collective."""
        both = torch.stack([-digests, digests])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        spread, size = (both[0] + both[1]).amax(dim=1), both[1][:, 0]
        found: list[bool] = (spread > _SAME * size).tolist()
        return found


class _Losses(TorchFunctionMode):
    """Losses over classes that are split come out as plain tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        return found.full_tensor() if func is functional.cross_entropy and is_sharded(found) else found


class _Watch(TorchFunctionMode):
    """Refuses random numbers in the shape of something that differs between tensor ranks, and heads that are cut wrongly."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self._split.refuse_short_heads(tensors((args, given))[0].shape[-1])
        if (
            func in _DRAWING
            and _chance(func, args, given)
            and (found := tensors((args, given)))
            and self._split.differs(found[0])
        ):
            raise LayoutError(
                "random numbers are drawn for a part of a tensor only: the curve would not be that of one rank",
                found=f"{func.__name__} on {tuple(found[0].shape)}, split over tensor ranks",
                do="use an nn.Dropout that the tp plan names ('colwise' or 'sequence': drawn whole, and cut), or drop it",
            )
        return func(*args, **given)


def _chance(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    position, training = _DRAWING[func], 2
    if position is None:
        return True
    attention = func is functional.scaled_dot_product_attention
    probability = args[position] if len(args) > position else given.get("dropout_p" if attention else "p")
    if probability is None:
        return not attention
    trains = args[training] if len(args) > training and not attention else given.get("training", True)
    return bool(trains) and probability > 0


class _Slice:
    """Drop-out on a part of a tensor: drawn as for the whole one, and cut."""

    def __init__(self, module: nn.Dropout, mesh: DeviceMesh, dim: int) -> None:
        self._module, self._parts, self._part, self._dim = module, mesh.size(), mesh.get_local_rank(), dim

    def __call__(self, x: Tensor) -> Tensor:
        if not self._module.training or self._module.p == 0:
            return x
        shape, length = list(x.shape), x.shape[self._dim]
        shape[self._dim] *= self._parts
        kept = functional.dropout(x.new_ones(shape), self._module.p)
        return x * kept.narrow(self._dim, self._part * length, length)


class _Entered(ParallelStyle):
    """The first argument goes in whole.

    Args:
        layout: how it arrives: as a part of the sequence, or whole.
        summed: inside, each rank computes a part of its gradient; else all of it.
    """

    def __init__(self, layout: Placement, *, summed: bool = True) -> None:
        self._layout, self._grads = layout, [Partial()] if summed else None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            part = DTensor.from_local(args[0], device_mesh, [self._layout], run_check=False)
            whole = part.redistribute(placements=[Replicate()]).to_local(grad_placements=self._grads)
            return whole, *args[1:]

        module.register_forward_pre_hook(before)
        return module


class _Columns(ParallelStyle):
    """Parameters in parts, mostly along their first dimension, for a module whose own code takes its parts.

    Args:
        dims: of other parameters, None for whole ones.
        entered: how its input goes in, where it is the first that takes it.
    """

    def __init__(self, dims: Mapping[str, int | None], entered: _Entered | None) -> None:
        self._dims, self._entered = dims, entered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, value in list(module.named_parameters(recurse=False)):
            dim = self._dims.get(name, 0)
            place = Replicate() if dim is None else Shard(dim)
            laid = distribute_tensor(value.detach(), device_mesh, [place], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(laid))
        return module if self._entered is None else self._entered._apply(module, device_mesh)  # noqa: SLF001 - a style's only verb


class _Both(ParallelStyle):
    """An output that stays split where a loss follows, and is whole where none does."""

    def __init__(self, style: ParallelStyle) -> None:
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._style.src_data_rank = self.src_data_rank
        laid = self._style._apply(module, device_mesh)  # noqa: SLF001 - as parallelize_module does
        laid.register_forward_hook(lambda _module, _args, out: out if torch.is_grad_enabled() else out.full_tensor())
        return laid


class _Beside(ParallelStyle):
    """A module with more parameters than a style of torch knows: it says itself along which dimension each is split."""

    def __init__(self, style: ParallelStyle, dims: Mapping[str, int | None]) -> None:
        self._style, self._dims = style, dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._style.src_data_rank = self.src_data_rank
        own = {name: module._parameters.pop(name) for name in self._dims}  # noqa: SLF001
        laid = self._style._apply(module, device_mesh)  # noqa: SLF001 - as parallelize_module does
        for name, dim in self._dims.items():
            value, place = own[name], Replicate() if dim is None else Shard(dim)
            assert value is not None
            laid.register_parameter(
                name, nn.Parameter(distribute_tensor(value, device_mesh, [place], src_data_rank=None))
            )
        return laid


class _Divides:
    """A sequence is split in equal parts, or not at all."""

    def __init__(self, name: str, parts: int) -> None:
        self._name, self._parts = name, parts

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].shape[1] % self._parts:
            raise LayoutError(
                "the sequence does not divide over the tensor ranks",
                found=f"{self._name} got length {args[0].shape[1]}, tp={self._parts}",
                do="pad to a multiple of it, or use a plan without sequence parallel",
            )


def _digest(value: Tensor) -> Tensor:
    """Size and sum, float64."""
    wide = value.detach().double()
    return torch.stack([wide.norm(), wide.sum() / max(1, wide.numel()) ** 0.5])
