"""Room: a backward pass in halves, as zero-bubble schedules have it (Qi et al., 2023): of inputs first, of weights later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.autograd.function import BackwardCFunction
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn


def divisible(ends: Sequence[Tensor]) -> bool:
    """Whether what computed these can go backward in halves.

    Not through what `torch.compile` made: its backward pass is one function, which has given its buffers away after the
    first half, or would run twice. Nor where nothing is to be differentiated.
    """
    compiled = (hasattr(getattr(type(node), "_forward_cls", None), "compiled_bw") for node in _nodes(ends))
    return any(value.requires_grad for value in ends) and not any(compiled)


@dataclass(slots=True)
class Half:
    """What is left of a pass when gradients of the inputs are known."""

    _groups: Sequence[Mapping[str, Any]]
    _graph: Sequence[Any] | None

    @classmethod
    def first(cls, roots: list[Tensor], grads: list[Tensor], inputs: list[Tensor], stage: nn.Module) -> Half:
        """Give the inputs their gradients."""
        graph = [root.view_as(root).grad_fn for root in roots]
        _, groups = stage_backward_input(roots, grads, inputs, _trained(stage))
        return cls(groups, graph if _written_in_python(groups) else None)

    def second(self, stage: nn.Module) -> None:
        """Give the weights theirs."""
        stage_backward_weight(_trained(stage), self._groups)  # type: ignore[arg-type]


def _trained(stage: nn.Module) -> Iterator[nn.Parameter]:
    return (value for value in stage.parameters() if value.requires_grad)


def _nodes(ends: Sequence[Tensor]) -> Iterator[Any]:
    """What computed these, back to the leaves."""
    coming: list[Any] = [value.grad_fn for value in ends]
    seen: set[Any] = {None}
    while coming:
        node = coming.pop()
        if node not in seen:
            seen.add(node)
            yield node
            coming += [before for before, _ in node.next_functions]


def _written_in_python(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the second half begins at an autograd.Function: torch 2.11 frees those with the first half's graph."""
    return any(isinstance(node, BackwardCFunction) for group in groups for node in group["intermediates"])
