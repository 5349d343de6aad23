"""Room: parameters that several stages of a pipeline share, as an embedding that is the head too. Knows no order of work.

Each rank that has one of the stages holds such a parameter whole, or its part of it, under the first of its names. Copies
begin alike and stay so: their gradients are summed before the update (Narayanan et al., "Megatron-LM", SC 2021), and of a norm
only the first copy is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from worldsize.errors import LayoutError
from worldsize.runtime.sharded import is_sharded, like, local
from worldsize.strategies.base import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from worldsize.strategies.pipeline.chain import Cut
    from worldsize.strategies.pipeline.line import Wire
    from worldsize.strategies.pipeline.order import Schedule


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter of several stages.

    Attributes:
        name: the first that the model has for it.
        modules: which have it, in the model's order.
        ranks: of the pipeline, which hold it, in their order.
    """

    name: str
    modules: tuple[nn.Module, ...]
    ranks: tuple[int, ...]

    def fill(self, fill: Callable[[nn.Module], None]) -> None:
        """Give it values by all of its modules in turn, as where the model is whole."""
        for module in self.modules:
            fill(module)


def between(model: nn.Module, cut: Cut, schedule: Schedule, *, alone: bool) -> list[Tie]:
    """What stages share.

    Args:
        model: whole.
        cut: into stages.
        schedule: where they lie.
        alone: each rank has its stages whole and to itself.

    Raises:
        LayoutError: one rank has several of the stages and lays each over others by itself.
    """
    found: list[Tie] = []
    held = [{value for _, part in stage for value in part.parameters()} for stage in cut.stages]
    for name, value in model.named_parameters():
        stages = [index for index, values in enumerate(held) if value in values]
        if len(stages) < 2:  # noqa: PLR2004 - one and another
            continue
        owners = [schedule.owner(stage) for stage in stages]
        if len(set(owners)) < len(owners) and not alone:
            raise LayoutError(
                f"schedule {schedule.name} puts stages that share parameters on one rank, each laid out by itself",
                found=brief([name]),
                do="choose a schedule with the first and the last stage on two ranks, as 1f1b, or untie them",
            )
        modules = (each for each in model.modules() if any(own is value for own in each.parameters(recurse=False)))
        found.append(Tie(name, tuple(modules), tuple(sorted(set(owners)))))
    return found


class Shared:
    """What one rank holds of them.

    Args:
        model: the user's, with this rank's stages in it.
        ties: all of the model.
        rank: in the pipeline.
        wire: to the others. Collective where there are ties.

    Raises:
        LayoutError: the ranks hold other parts of one of them.
    """

    def __init__(self, model: nn.Module, ties: Sequence[Tie], rank: int, wire: Wire) -> None:
        self._rank, self._wire = rank, wire
        mine = [tie for tie in ties if rank in tie.ranks and len(tie.ranks) > 1]
        self._held = [(model.get_parameter(tie.name), tie.ranks) for tie in mine]
        if ties:
            laid = wire.gather({tie.name: _laid(value) for tie, (value, _) in zip(mine, self._held, strict=True)})
            for tie in ties:
                _refuse_apart(tie.name, [laid[holder].get(tie.name) for holder in tie.ranks])

    def once(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Those of these gradients that no rank before this one has."""
        again = {id(value.grad) for value, ranks in self._held if ranks[0] != self._rank}
        return [grad for grad in grads if id(grad) not in again]

    @torch.no_grad()
    def sum_(self) -> None:
        """Every copy's gradient becomes the sum of all copies'. Collective between those that share."""
        for value, ranks in self._held:
            if value.requires_grad:
                self._sum(value, ranks)

    def _sum(self, value: nn.Parameter, ranks: Sequence[int]) -> None:
        grad = value.grad
        mine = torch.zeros_like(local(value)) if grad is None else local(grad)
        # A number behind says who has one: where nobody has, there is none.
        sent = torch.cat([mine.reshape(-1), mine.new_full((1,), float(grad is not None))])
        others = [rank for rank in ranks if rank != self._rank]
        parts = {self._rank: sent, **dict(zip(others, self._wire.trade(sent, others), strict=True))}
        total = parts[ranks[0]]
        for rank in ranks[1:]:  # in one order, so that copies stay alike to the bit
            total += parts[rank]
        if grad is not None or total[-1]:
            found = mine.copy_(total[:-1].view_as(mine))
            value.grad = grad if grad is not None else like(found, value) if is_sharded(value) else found


def _laid(value: Tensor) -> str:
    """How a rank's part lies in the whole."""
    return str(value.placements) if is_sharded(value) else "whole"


def _refuse_apart(name: str, laid: Sequence[str | None]) -> None:
    if len(set(laid)) > 1:
        raise LayoutError(
            "stages share a weight, and the tp plan lays it in two ways",
            found=f"{name}: {' and '.join(sorted({str(each) for each in laid}))}",
            do="an embedding 'rowwise' and a head 'colwise_rep' fit together",
        )
