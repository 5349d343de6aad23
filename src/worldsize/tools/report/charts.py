"""Room: curves as SVG that fits any width: lines are stretched, words are HTML beside them and are not. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from worldsize.tools.report import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WIDE, HIGH = 1000.0, 400.0
_TICKS = 4
_EDGE = 3.0
"""Percent of the width within which a word would reach over the end."""
_FROM_ZERO = ("size", "duration", "percent")
"""Kinds of numbers whose size is seen as a length."""
_LOG = 30.0
"""From which ratio of the most to the least value on the axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: where the page's JSON holds it, its points, its colour (a CSS variable)."""

    label: str
    path: str
    points: dict[str, list[Any]]
    color: str
    thin: bool = False

    @property
    def values(self) -> list[float]:
        """What can be drawn."""
        return [value for value in self.points["y"] if value is not None]


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to 0..1."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies."""
        low, high = (self._of(self.low), self._of(self.high))
        return (self._of(value) - low) / (high - low) if high > low else 0.5

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def plot(lines: Sequence[Line], kind: str, restarts: Sequence[int] = ()) -> str:
    """The picture, with its axes; the page's script finds the points under `data-curves`."""
    xs = [x for line in lines for x in line.points["x"]]
    across, up = (
        Axis(min(xs), max(xs)),
        scale([value for line in lines for value in line.values], zero=kind in _FROM_ZERO),
    )
    told = [{"label": line.label, "path": line.path, "color": line.color} for line in lines]
    curves = json.dumps({"x": [across.low, across.high], "kind": kind, "series": told})
    ticks = list(nice(up))
    grid = "".join(f'<line class="grid" x1="0" x2="1000" y1="{_y(up, tick)}" y2="{_y(up, tick)}"/>' for tick in ticks)
    marks = "".join(
        f'<line class="again" x1="{_x(across, at)}" x2="{_x(across, at)}" y1="0" y2="400"/>'
        for at in restarts
        if across.low < at < across.high
    )
    drawn = "".join(_path(line, across, up) for line in lines)
    left = "".join(
        f'<span class="y" style="top:{(1 - up.at(tick)) * 100:.2f}%">{_tick(tick, kind)}</span>' for tick in ticks
    )
    return (
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(_told(lines, kind))}" '
        f"data-curves='{escape(curves, quote=True)}'>"
        f'<svg viewBox="0 0 {WIDE:g} {HIGH:g}" preserveAspectRatio="none" aria-hidden="true">{grid}{marks}{drawn}</svg>'
        f"{left}{''.join(_below(across))}</div>"
    )


def scale(values: Sequence[float], *, zero: bool = False) -> Axis:
    """The axis of these values: logarithmic where they lie far apart, unless it begins at zero."""
    if not values:
        return Axis(0.0, 1.0)
    low, high = min(values), max(values)
    if low > 0 and high / low > _LOG and not zero:
        return Axis(low / 1.1, high * 1.1, log=True)
    if high == low:
        return Axis(min(0.0, low * 2), max(low * 2, 1e-12))
    room = (high - low) * 0.06
    # An axis that nearly reaches zero begins there: shares and lengths are then seen as what they are.
    return Axis(0.0 if low >= 0 and (zero or low < high * 0.35) else low - room, high + room)


def nice(axis: Axis) -> Iterator[float]:
    """Round values on an axis."""
    if axis.log:
        first, last = math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high))
        yield from (10.0**power for power in range(first, last + 1, max(1, (last - first) // _TICKS + 1)))
        return
    step = _round((axis.high - axis.low) / _TICKS)
    tick = math.ceil(axis.low / step) * step
    while tick <= axis.high + step * 1e-9:
        yield 0.0 if abs(tick) < step * 1e-9 else tick
        tick += step


def _round(length: float) -> float:
    power = 10.0 ** math.floor(math.log10(length))
    return next(power * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if power * factor >= length * 0.999)


def _path(line: Line, across: Axis, up: Axis) -> str:
    parts, pen = [], "M"
    for x, y in zip(line.points["x"], line.points["y"], strict=True):
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{_x(across, x)} {_y(up, y)}")
        pen = "L"
    if len(line.values) == 1:
        parts.append("h.1")
    kind = ' class="thin"' if line.thin else ""
    return f'<path{kind} style="stroke:var({line.color})" stroke-linecap="round" d="{"".join(parts)}"/>'


def _x(axis: Axis, value: float) -> str:
    return f"{axis.at(value) * WIDE:.5g}"


def _y(axis: Axis, value: float) -> str:
    return f"{(1 - axis.at(value)) * HIGH:.5g}"


def _tick(value: float, kind: str) -> str:
    return words.word(value, kind) if value or kind != "duration" else "0"


def _below(axis: Axis) -> Iterator[str]:
    ticks = (
        [tick for tick in nice(Axis(axis.low, axis.high)) if tick == int(tick)]
        if axis.high > axis.low
        else [axis.low]
    )
    for tick in ticks:
        place = axis.at(tick) * 100 if axis.high > axis.low else 50
        edge = " begin" if place < _EDGE else " end" if place > 100 - _EDGE else ""
        yield f'<span class="x{edge}" style="left:{place:.2f}%">{tick:,.0f}</span>'


def _told(lines: Sequence[Line], kind: str) -> str:
    parts = []
    for line in lines:
        values = line.values
        if values:
            shown = [words.word(value, kind) for value in (values[0], values[-1], min(values), max(values))]
            parts.append(f"{line.label}: from {shown[0]} to {shown[1]}, least {shown[2]}, most {shown[3]}")
    return "; ".join(parts) + ". Arrow keys read it step by step."
