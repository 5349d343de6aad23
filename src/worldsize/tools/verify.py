"""Room: proofs on the user's own program: it resumes exactly, and every layout trains the curve and reads what any wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError, LaunchError
from worldsize.runtime.keys import key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worldsize.tools.trial import Curve, Layout, Program


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two curves part."""

    step: int | None
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        where = "final weights" if self.step is None else f"step {self.step}"
        return f"{where}: {self.what} is {self.found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        name: of what with what.
        steps: of the run that is the measure.
        largest: relative difference of each number, at worst.
        first: the first difference that is too large, or None.
    """

    name: str
    steps: int
    largest: dict[str, float]
    first: Difference | None


def resume(
    program: Program, layouts: Sequence[Layout], *, at: Sequence[int] | None, points: int, tolerance: float
) -> Iterator[Row]:
    """Run straight on the first layout, then interrupted at several points and resumed on every layout.

    Args:
        program: see there.
        layouts: the first runs straight and up to each interruption; all of them resume.
        at: after which steps to interrupt; chosen by a fixed key where None.
        points: how many, where they are chosen.
        tolerance: largest relative difference.

    Yields:
        a row for each interruption and resuming layout.
    """
    straight = program.run("straight", layouts[0])
    for stop in at or chosen(straight.steps, points):
        if not 0 < stop < straight.steps:
            raise ConfigError(f"cannot interrupt after step {stop}", found=f"a run of {straight.steps} steps")
        for layout in layouts:
            name = f"stop-{stop}-{layout.folder}"
            program.run(name, layouts[0], stop_after=stop)
            yield compare(
                f"stopped after {stop}, resumed on {layout}", straight, program.run(name, layout), tolerance
            )


def matrix(
    program: Program, layouts: Sequence[Layout], *, at: int | None, writers: Sequence[Layout], tolerance: float
) -> Iterator[Row]:
    """Stop on each writer, and go on from there on every layout; compare with the first layout's run straight on.

    A pair that does not run is a row that differs, so that none is missing.

    Args:
        program: see there.
        layouts: the readers; the first also runs straight on.
        at: after which step to stop; chosen by a fixed key where None.
        writers: which layouts write.
        tolerance: largest relative difference.

    Yields:
        a row for each pair, the writers' in their order.
    """
    straight = program.run("straight", layouts[0])
    stop = at or chosen(straight.steps, 1)[0]
    for writer in writers:
        program.run(writer.folder, writer, stop_after=stop)
        for reader in layouts:
            trial = f"{writer.folder}-then-{reader.folder}"
            program.copy(writer.folder, trial)
            name = f"{writer} stopped after {stop}, resumed on {reader}"
            try:
                yield compare(name, straight, program.run(trial, reader), tolerance)
            except LaunchError as failed:
                yield Row(
                    name, straight.steps, {"loss": math.inf}, Difference(None, "the run", "an end", str(failed))
                )


def parity(program: Program, layouts: Sequence[Layout], *, tolerance: float) -> Iterator[Row]:
    """Run on every layout and compare each with the first. Yields a row for each further layout."""
    first = program.run(layouts[0].folder, layouts[0])
    for layout in layouts[1:]:
        other = program.run(layout.folder, layout)
        yield compare(f"{layout} against {layouts[0]}", first, other, tolerance)


def chosen(steps: int, points: int) -> list[int]:
    """Where to interrupt a run of so many steps: spread over it, inside of epochs as it falls, the same at each call."""
    if steps < 2:  # noqa: PLR2004 - one step has no inside
        raise ConfigError("the run is too short to interrupt", found=f"{steps} steps", do="verify a longer duration")
    cuts = [1 + key(0, "verify", point) % (steps - 1) for point in range(points)]
    return sorted(set(cuts))


def compare(name: str, expected: Curve, found: Curve, tolerance: float) -> Row:
    """Compare sample ids, every number of every step, and the final weights."""
    largest: dict[str, float] = {}
    first = _first_ids(expected, found)
    for number, values in expected.numbers.items():
        for step in sorted(values.keys() | found.numbers[number].keys()):
            before, after = values.get(step), found.numbers[number].get(step)
            if number == "grad_norm" and (before is None or after is None):
                continue  # taken for every tenth step only, counted from where an attempt began
            apart = relative(before, after)
            largest[number] = max(largest.get(number, 0.0), apart)
            if apart > tolerance and (first is None or first.step is None or step < first.step):
                first = Difference(step, number, before, after)
    apart, where = weights(expected, found)
    largest["weights"] = apart
    if first is None and apart > tolerance:
        first = Difference(None, where, "the same", f"{apart:.3g} apart")
    return Row(name, expected.steps, largest, first)


def relative(before: float | None, after: float | None) -> float:
    """Relative difference; infinite where one is missing, zero where both are equal or both NaN."""
    if before is None or after is None:
        return math.inf
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0.0
    return abs(before - after) / max(abs(before), abs(after))


def weights(expected: Curve, found: Curve) -> tuple[float, str]:
    """Largest difference of a tensor of the final weights, relative to all weights, and in which tensor.

    Not relative to the tensor itself: a bias before a normalisation has no gradient but rounding, which Adam scales up.
    """
    from worldsize.checkpoint.weights import read_weights

    before, after = read_weights(expected.run), read_weights(found.run)
    if before.keys() != after.keys():
        return math.inf, f"names {sorted(before.keys() ^ after.keys())[:3]}"
    size = math.hypot(*(tensor.double().norm().item() for tensor in before.values())) or 1.0
    apart = {name: (value.double() - after[name].double()).norm().item() / size for name, value in before.items()}
    worst = max(apart, key=lambda name: apart[name], default="")
    return apart.get(worst, 0.0), worst


def _first_ids(expected: Curve, found: Curve) -> Difference | None:
    for step in sorted(expected.ids.keys() | found.ids.keys()):
        if expected.ids.get(step) != found.ids.get(step):
            return Difference(step, "the set of samples", expected.ids.get(step), found.ids.get(step))
    return None
