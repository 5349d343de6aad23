"""Room: a plan as lines for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.tools.plan import judge
from worldsize.tools.plan.machine import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worldsize.tools.plan.judge import Verdict
    from worldsize.tools.plan.planning import Machine, Saves

HEAD = ("layout", "fits", "needed", "peak", *judge.KINDS, "in node", "to others")
_SMALL = 0.01


def size(count: float) -> str:
    """Bytes, in a unit that leaves some digits."""
    if count == 0:
        return "-"
    if count >= _SMALL * GIB:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / 2**20:,.2f} MiB" if count >= 2**20 * _SMALL else f"{count / 1024:,.1f} KiB"


def cells(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """The table's rows: the layouts that can run, those that need least first."""
    rows: list[tuple[str, ...]] = [HEAD]
    for verdict in sorted(verdicts, key=lambda each: each.needed):
        if verdict.error:
            continue
        parts = judge.told(verdict.parts)
        name = verdict.layout + ("" if verdict.traced else " *")
        sent = (size(verdict.within), size(verdict.between))
        rows.append(
            (
                name,
                verdict.fits or "?",
                size(verdict.needed),
                size(verdict.peak),
                *(size(parts[kind]) for kind in judge.KINDS),
                *sent,
            )
        )
    return rows


def lines(verdicts: Sequence[Verdict], machine: Machine, saved: Saves) -> Iterator[str]:
    """What stands below the table."""
    if any(not verdict.traced and not verdict.error for verdict in verdicts):
        yield "* by formula from ddp: an upper bound"
    for verdict in verdicts:
        if verdict.error:
            yield f"{verdict.layout}: cannot run: {verdict.error}"
    notes = dict.fromkeys(note for verdict in verdicts if verdict.traced for note in verdict.notes)
    yield from notes
    yield from _batches(verdicts)
    yield (
        f"a checkpoint: {size(saved.size)}, {saved.seconds:,.1f} s at {saved.speed / 1e9:g} GB/s; "
        f"{saved.count} of them, and one being written: {size(saved.disk)}"
    )
    if machine.gpu is not None:
        yield (
            f"{machine.gpu.name}: {size(machine.gpu.memory)}. Needed is the peak of the busiest rank, and a margin for the "
            "CUDA context, NCCL and what lies between the allocator's blocks"
        )
    if any(verdict.fits == "tight" for verdict in verdicts):
        yield "tight: it may run, by how the allocator's blocks fall; PYTORCH_ALLOC_CONF=expandable_segments:True helps"


def _batches(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The arithmetic of a step, a line for each number of shares."""
    seen: dict[int, list[str]] = {}
    facts = {}
    for verdict in verdicts:
        if not verdict.error:
            seen.setdefault(verdict.batch["shares"], []).append(verdict.layout)
            facts[verdict.batch["shares"]] = verdict.batch
    for shares, names in sorted(seen.items()):
        batch = facts[shares]
        most, fewest = batch["most"], batch["fewest"]
        each = f"{most} each" if most == fewest else f"{fewest} to {most} each: ranks wait for the busiest"
        yield (
            f"global batch {batch['global_batch']} = {batch['micro_batches']} micro-batches of {batch['micro_batch']} over "
            f"{shares} share{'s' * (shares > 1)}, {each} ({', '.join(names)})"
        )
