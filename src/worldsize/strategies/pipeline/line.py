"""Room: this rank's place in a pipeline: its stages, its neighbours, and a pass without gradients. No order, no turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from worldsize.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from worldsize.strategies.base import Strategy
    from worldsize.strategies.pipeline.chain import Stage
    from worldsize.strategies.pipeline.order import Schedule
    from worldsize.strategies.pipeline.shapes import Passed, Shapes, Trace


class Wire:
    """Tensors to and from the other ranks of the pipeline.

    Args:
        group: the pipeline's ranks. Collective: all of them make theirs.
        device: where tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self._away: list[tuple[Sequence[Tensor], list[Any]]] = []
        # NCCL wants all ranks in a group's first call, and only two take part in a transfer.
        dist.all_reduce(torch.zeros((), device=device), group=group)

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Begin to send them. They are held until `wait`."""
        whole = [tensor.detach().contiguous() for tensor in tensors]
        self._away.append((whole, self._begin(dist.isend, whole, to)))

    def receive(self, passed: Sequence[Any], source: int) -> tuple[list[Tensor], list[Any]]:
        """Begin to receive tensors like these facts. Returns them and what to wait for before they are used."""
        room = [fact.empty(self._device) for fact in passed]
        return room, self._begin(dist.irecv, room, source)

    def trade(self, mine: Tensor, peers: Sequence[int]) -> list[Tensor]:
        """Give these ranks a tensor and have theirs of the same shape. Called by all of them."""
        sent = mine.to(self._device)
        room = [torch.empty_like(sent) for _ in peers]
        both = [(dist.isend, [sent] * len(room)), (dist.irecv, room)]
        swaps = [
            dist.P2POp(verb, tensor, self._rank(peer), group=self.group)
            for verb, tensors in both
            for tensor, peer in zip(tensors, peers, strict=True)
        ]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
        return [each.to(mine.device) for each in room]

    def gather(self, value: Any) -> list[Any]:
        """A plain value of each rank of the pipeline. Collective."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def wait(self) -> None:
        """Until everything that was sent has left."""
        for _, works in self._away:
            for work in works:
                work.wait()
        self._away.clear()

    def spread(self, tensors: Sequence[Tensor], source: int) -> None:
        """Give all ranks of the pipeline what one of them has. Collective."""
        for tensor in tensors:
            dist.broadcast(tensor, self._rank(source), group=self.group)

    def _begin(self, verb: Any, tensors: Sequence[Tensor], peer: int) -> list[Any]:
        if not tensors:
            return []
        found: list[Any] = dist.batch_isend_irecv(
            [dist.P2POp(verb, tensor, self._rank(peer), group=self.group) for tensor in tensors]
        )
        return found

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self.group, place)


@dataclass(slots=True)
class Line:
    """What all turns of a model share on one rank.

    Attributes:
        rank: place in the pipeline.
        schedule: where stages lie, and in which order they work.
        stages: this rank's, by number.
        inner: how a stage lies over the ranks that have the same one.
        shapes: what passes between stages.
        wire: the other ranks.
        unpacks: whether a tuple that a stage returns is the next one's arguments.
        halves: whether a backward pass may be taken in two halves; only for stages whose strategy exchanges at the turn's end.
    """

    rank: int
    schedule: Schedule
    stages: dict[int, Stage]
    inner: Strategy
    shapes: Shapes
    wire: Wire
    unpacks: bool
    halves: bool
    last: int = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.schedule.stages - 1

    def forward(
        self, stage: int, seed: int, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """One stage's forward pass. Returns the tensors that it gives.

        Raises:
            StepError: it gives others than were found beforehand.
        """
        module = self.stages[stage]
        module.seed, module.idle = seed, trace.idle
        found = tree_leaves(module(*args, **kwargs))
        wanted = trace.passed[stage].facts
        here = [(tuple(value.shape), value.dtype) for value in found]
        if here != [(fact.shape, fact.dtype) for fact in wanted]:
            raise StepError(
                f"stage {stage} gives other tensors than the model without values showed",
                found=f"{here}, expected {[(fact.shape, fact.dtype) for fact in wanted]}",
                do="shapes and dtypes must follow from those of the model's inputs alone",
            )
        return found

    def arguments(self, passed: Passed, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What a stage is called with, of what the one before gave."""
        value = passed.whole(tensors)
        return value if self.unpacks and isinstance(value, tuple) else (value,)

    def glance(self, trace: Trace, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass without gradients: its output on every rank. Collective over the pipeline."""
        given: list[Tensor] = []
        for stage in range(len(trace.passed)):
            if self.schedule.owner(stage) != self.rank:
                continue
            if stage > 0:
                before = trace.passed[stage - 1]
                if self.schedule.owner(stage - 1) != self.rank:
                    given, works = self.wire.receive(before.facts, self.schedule.owner(stage - 1))
                    for work in works:
                        work.wait()
                args, kwargs = self.arguments(before, given), {}
            given = self.forward(stage, seed, trace, args, kwargs)
            if stage < self.last and self.schedule.owner(stage + 1) != self.rank:
                self.wire.send(given, self.schedule.owner(stage + 1))
        end, owner = trace.passed[self.last], self.schedule.owner(self.last)
        output = (
            [value.contiguous() for value in given]
            if owner == self.rank
            else [fact.empty(self.inner.device) for fact in end.facts]
        )
        self.wire.spread(output, owner)
        self.wire.wait()
        return end.whole(output)

    def placeholder(self, trace: Trace) -> Any:
        """What a call returns on a rank that does not have the last stage: the right tensors, of zeros."""
        end = trace.passed[self.last]
        return end.whole([_zeros(fact.empty(self.inner.device).zero_(), trained=fact.trained) for fact in end.facts])


def _zeros(value: Tensor, *, trained: bool) -> Tensor:
    """Not a leaf, as an output is none: programs may write into it."""
    return value + torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True) if trained else value
