"""Room: in which order each rank computes and hands over, for every schedule by name. Pure: no tensors, no processes.

The orders of computing are torch's own (`torch.distributed.pipelining`), but for 1F1B (Narayanan et al., 2019): torch holds
that one as a loop, and as an order only for drawings, without the last rank's first micro-batch. Handing over is put between
them here, in one order that holds for all ranks: the earliest transfer that is not done yet is the next one of both its ends,
so that none waits for ever. Micro-batches that a schedule needs and a step does not have are left out, on all ranks alike.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from worldsize.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "loopedbfs": "LoopedBFS",
    "interleaved1f1b": "Interleaved1F1B",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
}
"""Ours and torch's names."""
_ONE_BY_ONE = "1f1b"
_ONE_STAGE = ("gpipe", _ONE_BY_ONE)
_VEE = "zbvzerobubble"
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
SEND, RECEIVE = "send", "receive"


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: F (forward), B (backward), I and W (backward in two halves: of inputs, of weights), or one end of a transfer
            of what F or B (I) made: `send F`, `receive F`, `send B`, `receive B`.
        stage: which stage computes it; of a transfer, which one made it.
        micro: which micro-batch.
    """

    kind: str
    stage: int
    micro: int


class Schedule:
    """Where stages lie and in which order they work.

    Args:
        name: one of `SCHEDULES`.
        ranks: how many ranks the pipeline has.
        stages: how many stages; as many as the schedule wants where None.

    Raises:
        ConfigError: the name is not known.
        LayoutError: the schedule does not work with so many stages.
    """

    def __init__(self, name: str, ranks: int, stages: int | None) -> None:
        if name not in SCHEDULES:
            raise ConfigError(f"schedule {name!r} is not known", do=f"choose one of {', '.join(SCHEDULES)}")
        self.name, self.ranks = name, ranks
        self.stages = stages or ranks * (1 if name in _ONE_STAGE else 2)
        each, rest = divmod(self.stages, ranks)
        wanted = {**dict.fromkeys(_ONE_STAGE, 1), _VEE: 2}.get(name)
        if rest or not each or each != (wanted or each):
            raise LayoutError(
                f"schedule {name} needs {wanted or 'equally many'} stages on each rank",
                found=f"{self.stages} stages, pp={ranks}",
                do=f"use stages={ranks * (wanted or 2)}",
            )
        self._orders: dict[int, list[list[Action]]] = {}

    def owner(self, stage: int) -> int:
        """Which rank of the pipeline holds a stage. The last one always has the last stage."""
        if self.name == _VEE:
            return self.ranks - 1 - (stage if stage < self.ranks else 2 * self.ranks - 1 - stage)
        return stage % self.ranks

    def held(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage in range(self.stages) if self.owner(stage) == rank]

    def order(self, rank: int, micros: int) -> list[Action]:
        """What a rank does for so many micro-batches."""
        if micros not in self._orders:
            computed = (
                [_kept(actions, micros) for actions in self._computed(micros)]
                if self.name != _ONE_BY_ONE
                else [_one_by_one(rank, self.ranks, micros) for rank in range(self.ranks)]
            )
            self._orders[micros] = _with_transfers(computed, self.owner, self.stages)
        return self._orders[micros][rank]

    def _computed(self, micros: int) -> list[Sequence[Any]]:
        """Torch's order for each rank, for the fewest micro-batches from `micros` on that its schedule can take."""
        kind = get_schedule_class(SCHEDULES[self.name])
        for count in range(micros, micros + self.stages + 1):
            stages = [SimpleNamespace(**self._facts()) for _ in range(self.stages // self.ranks)]
            try:
                made: Any = kind(stages[0] if self.name in _ONE_STAGE else stages, count)
            except ValueError:
                continue
            found: Mapping[int, Sequence[Any]] = made.pipeline_order
            ranks = range(self.ranks)
            return [found[rank] for rank in (reversed(ranks) if self.name == _VEE else ranks)]
        raise LayoutError(f"schedule {self.name} has no order", found=f"{micros} micro-batches, {self.stages} stages")

    def _facts(self) -> dict[str, Any]:
        """All that the order depends on, of what torch calls a stage."""
        return {
            "num_stages": self.stages,
            "group_size": self.ranks,
            "group_rank": 0,
            "stage_index": 0,
            "submod": None,
        }


def _kept(actions: Sequence[Any], micros: int) -> list[Action | None]:
    """In our words. What is left out stays as an empty place, which the order of transfers goes by."""
    found: list[Action | None] = []
    for each in actions:
        if each is None:
            found.append(None)
        elif each.computation_type.value in (FORWARD, BACKWARD, INPUTS, WEIGHTS):
            kept = each.microbatch_index < micros
            action = Action(each.computation_type.value, each.stage_index, each.microbatch_index)
            found.append(action if kept else None)
    return found


def _one_by_one(rank: int, ranks: int, micros: int) -> list[Action]:
    """As many forward passes ahead as there are ranks behind, then one backward for each."""
    ahead = min(micros, ranks - 1 - rank)
    found = [Action(FORWARD, rank, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            found.append(Action(FORWARD, rank, micro + ahead))
        found.append(Action(BACKWARD, rank, micro))
    return found


def _with_transfers(
    computed: Sequence[Sequence[Action | None]], owner: Callable[[int], int], stages: int
) -> list[list[Action]]:
    """Let all ranks work through their orders together, and note each transfer at both ends when it is made."""
    found: list[list[Action]] = [[] for _ in computed]
    done: set[Action] = set()
    at = [0] * len(computed)
    while any(place < len(order) for place, order in zip(at, computed, strict=True)):
        before = list(at)
        for rank, order in enumerate(computed):
            if at[rank] == len(order):
                continue
            action = order[at[rank]]
            if action is not None:
                if not _ready(action, done, stages):
                    continue
                found[rank].append(action)
                done.add(action)
                _hand_over(action, found, owner, stages)
            at[rank] += 1
        assert at != before, "torch's schedule waits for itself"
    return found


def _hand_over(action: Action, found: list[list[Action]], owner: Callable[[int], int], stages: int) -> None:
    kind, stage, micro = action
    to = {FORWARD: stage + 1, BACKWARD: stage - 1, INPUTS: stage - 1}.get(kind, -1)
    if 0 <= to < stages and owner(to) != owner(stage):
        what = FORWARD if kind == FORWARD else BACKWARD
        found[owner(stage)].append(Action(f"{SEND} {what}", stage, micro))
        found[owner(to)].append(Action(f"{RECEIVE} {what}", stage, micro))


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, micro = action
    if kind == FORWARD:
        return stage == 0 or Action(FORWARD, stage - 1, micro) in done
    if kind == WEIGHTS:
        return Action(INPUTS, stage, micro) in done
    if stage == stages - 1:
        return Action(FORWARD, stage, micro) in done
    return bool({Action(BACKWARD, stage + 1, micro), Action(INPUTS, stage + 1, micro)} & done)
