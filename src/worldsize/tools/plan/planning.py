"""Room: a plan from beginning to end: layouts, questions, answers, verdicts. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from worldsize.errors import LaunchError
from worldsize.tools.plan import formula, judge, layouts
from worldsize.tools.plan.asking import answers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.tools.plan.asking import Program, Question
    from worldsize.tools.plan.judge import Verdict
    from worldsize.tools.plan.machine import Gpu
    from worldsize.tools.trial import Layout


@dataclass(frozen=True, slots=True)
class Machine:
    """What is planned for.

    Attributes:
        gpus: how many.
        local: of a node.
        gpu: their kind; None where only sizes are asked for.
    """

    gpus: int
    local: int
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class Saves:
    """Checkpoints.

    Attributes:
        size: bytes of one.
        count: how many are kept.
        speed: bytes a second that all ranks together write.
    """

    size: float
    count: int
    speed: float

    @property
    def seconds(self) -> float:
        """Of writing one."""
        return self.size / self.speed

    @property
    def disk(self) -> float:
        """Bytes of all that are kept, and of the one that is written before the oldest goes."""
        return self.size * (self.count + 1)


def made(program: Program, wanted: Sequence[Layout], machine: Machine, told: Mapping[str, str]) -> list[Verdict]:
    """A verdict for each layout, in their order.

    Args:
        program: what is run.
        wanted: layouts.
        machine: what for.
        told: further words to the program: its precision.

    Raises:
        ConfigError: a layout does not fill whole nodes.
        LaunchError: the program ran under none of them; with the first error.
    """
    asked = {layout: layouts.asked(layout) for layout in wanted}
    questions = {layout: _questions(layout, machine, told) for layout in dict.fromkeys(asked.values())}
    flat = [each for group in questions.values() for each in group]
    found = iter(answers(program, flat))
    by_layout = {layout: [next(found) for _ in group] for layout, group in questions.items()}
    verdicts = [_verdict(layout, by_layout[asked[layout]], machine.gpu) for layout in wanted]
    if all(verdict.error for verdict in verdicts):
        raise LaunchError(
            "no layout can be planned", found=verdicts[0].error.rstrip("."), do="run the program by itself first"
        )
    return verdicts


def _questions(layout: Layout, machine: Machine, told: Mapping[str, str]) -> list[Question]:
    found = judge.questions(layout, layouts.local_of(layout, machine.local))
    return [replace(each, options={**each.options, **told}) for each in found]


def _verdict(layout: Layout, found: list[dict[str, Any]], gpu: Gpu | None) -> Verdict:
    if layout.strategy in layouts.BY_FORMULA:
        found = [formula.applied(layout.strategy, answer, layout.ranks) for answer in found]
    return judge.worst(layout, found, gpu)


def saves(verdicts: Sequence[Verdict], count: int, speed: float) -> Saves:
    """What checkpoints take: the same under every layout, so what the fullest view of the model says."""
    size = max(
        (verdict.whole["model"] + verdict.whole["optimizer"] for verdict in verdicts if not verdict.error),
        default=0.0,
    )
    return Saves(size, count, speed)


def as_json(verdicts: Sequence[Verdict], machine: Machine, saved: Saves) -> dict[str, Any]:
    """All of it in plain values; sizes in bytes."""
    return {
        "gpus": machine.gpus, "gpus_per_node": machine.local,
        "gpu": None if machine.gpu is None else asdict(machine.gpu),
        "layouts": [{**asdict(verdict), "parts": judge.told(verdict.parts)} for verdict in verdicts],
        "checkpoint": {**asdict(saved), "seconds": saved.seconds, "disk": saved.disk},
    }  # fmt: skip
