"""Room: from what was counted to a verdict: what a rank needs, whether a GPU has it, what goes over the wire. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from worldsize.tools.plan.asking import Question
from worldsize.tools.plan.machine import Margin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.tools.plan.machine import Gpu
    from worldsize.tools.trial import Layout

Fits = Literal["yes", "tight", "no"]
_STAGES = 4
"""Of longer pipelines the first two stages and the last two are looked at: the ones between are like the second."""
_PLACES = ("pp", "replicas", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A layout's busiest rank. Sizes in bytes.

    Attributes:
        layout: as it is written.
        peak: the most that torch's allocator holds.
        parts: what that is, by kind.
        needed: with the whole margin: surely enough.
        fits: "yes", "tight" where it may, by how the allocator's blocks fall, or "no"; None where no GPU was named.
        traced: whether the program was run, or a formula used.
        batch: the arithmetic of the step.
        within, between: bytes that a rank sends in a step, in its node and to others.
        whole: what a checkpoint keeps.
        rank: the busiest.
        notes: for a person.
        error: why it cannot run.
    """

    layout: str
    peak: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    needed: int = 0
    fits: Fits | None = None
    traced: bool = True
    batch: Mapping[str, Any] = field(default_factory=dict)
    within: float = 0.0
    between: float = 0.0
    whole: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
    notes: tuple[str, ...] = ()
    error: str = ""


def axes(layout: Layout) -> dict[str, int]:
    """How long the axes are that were said."""
    return {name: int(size) for name, size in layout.axes if name != "schedule"}


def questions(layout: Layout, local: int, *, cuda: bool = True) -> list[Question]:
    """What must be asked to know the busiest rank: one question, or one for each kind of stage.

    Args:
        layout: with its number of ranks.
        local: ranks of a node.
        cuda: see `Question`.
    """
    stages = axes(layout).get("pp", 1)
    places = sorted({*range(min(stages, _STAGES // 2)), *range(max(0, stages - _STAGES // 2), stages)})
    return [
        Question(
            f"{layout.folder}-{place}", place * (layout.ranks // stages), layout.ranks, local, layout.options,
            live=0 if stages > 1 else 2, cuda=cuda,
        )
        for place in places
    ]  # fmt: skip


def worst(
    layout: Layout, found: Sequence[Mapping[str, Any]], gpu: Gpu | None, margin: Margin | None = None
) -> Verdict:
    """The verdict, by the rank that needs most.

    Args:
        layout: that was asked about.
        found: its answers, in the order of its questions.
        gpu: what it shall run on; None counts storages alone.
        margin: what must stay free.
    """
    errors = [str(answer["error"]) for answer in found if "error" in answer]
    if errors:
        return Verdict(str(layout), error=errors[0])
    each = [_one(layout, answer, gpu) for answer in found]
    busiest = max(each, key=lambda verdict: verdict.peak)
    whole = {name: sum(verdict.whole[name] for verdict in each) for name in busiest.whole}
    groups = 1 + len(axes(layout)) if layout.ranks > 1 else 0
    least, most = (margin or Margin()).of(busiest.peak, groups, traced=busiest.traced)
    return replace(
        busiest, whole=whole, needed=busiest.peak + most, fits=_fits(busiest.peak + least, busiest.peak + most, gpu)
    )


def _fits(least: int, needed: int, gpu: Gpu | None) -> Fits | None:
    if gpu is None:
        return None
    return "yes" if needed <= gpu.memory else "tight" if least <= gpu.memory else "no"


def _one(layout: Layout, answer: Mapping[str, Any], gpu: Gpu | None) -> Verdict:
    batch = answer["batch"]
    parts = dict(answer["parts"])
    if gpu is not None:
        # The next step's micro-batches come while this one's are in use.
        parts["inputs"] = int(2 * batch["most"] * answer["input"])
        parts["libraries"] = 2 * gpu.workspace
    built = answer["built"].get("size", 0) if not axes(layout).get("pp") else 0
    peak = answer["peak"] + parts.get("inputs", 0) + parts.get("libraries", 0)
    if built > peak:
        peak, parts = built, dict(answer["built"]["parts"])
    traffic, steps = answer["traffic"], answer["traffic"]["steps"]
    return Verdict(
        str(layout), peak, parts, traced="formula" not in answer, batch=batch, whole=answer["whole"],
        notes=tuple(answer["notes"]),
        within=_sent(traffic["within"], batch, steps), between=_sent(traffic["between"], batch, steps),
    )  # fmt: skip


def _sent(by_micro: Mapping[str, float], batch: Mapping[str, Any], steps: int) -> float:
    """Of a step, where only some of its micro-batches were run: the others are like the first."""
    whole = sum(by_micro.values()) / steps
    left = float(batch["most"] - batch["traced"])
    return whole + left * by_micro.get("0", 0.0) / steps


KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs", "other")
_TOLD = {
    "step": "activations",
    "averages": "optimizer",
    "build": "other",
    "libraries": "other",
    "temporary": "activations",
}


def told(parts: Mapping[str, int]) -> dict[str, int]:
    """Parts of a peak by the kinds that a person reads; all of them, so that they add up to the peak."""
    found = dict.fromkeys(KINDS, 0)
    for name, size in parts.items():
        found[_TOLD.get(name, name)] += size
    return found
