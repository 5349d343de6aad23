"""Room: what a scaling measurement shows: a table, CSV, two pictures. Pure."""

from __future__ import annotations

import csv
import io
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worldsize.tools.scale.points import Row

COLUMNS: dict[str, Callable[[Row], object]] = {
    "strategy": lambda row: row.point.strategy or "(own)",
    "nodes": lambda row: row.point.nodes,
    "ranks": lambda row: row.point.ranks,
    "intervals": lambda row: len(row.point.intervals),
    "step_ms": lambda row: row.point.step[1] * 1e3,
    "step_ms_quarter": lambda row: row.point.step[0] * 1e3,
    "step_ms_three_quarters": lambda row: row.point.step[2] * 1e3,
    "samples_per_s": lambda row: row.point.throughput,
    "epoch_s": lambda row: row.point.epoch_seconds,
    "speedup": lambda row: row.speedup,
    "efficiency": lambda row: row.efficiency,
    "waiting_share": lambda row: row.point.waiting,
    "device_use": lambda row: row.point.use,
    "joules_per_step": lambda row: row.point.joules,
}
"""The columns of the CSV."""
_HEAD = (
    "strategy",
    "ranks",
    "step ms",
    "(middle half)",
    "samples/s",
    "epoch s",
    "speed-up",
    "efficiency",
    "waiting",
    "use",
    "J/step",
)
_WIDE, _HIGH, _EDGE = 420, 300, 48
_COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")


def as_csv(rows: Iterable[Row]) -> str:
    """One line a point, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([read(row) for read in COLUMNS.values()] for row in rows)
    return text.getvalue()


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """For a person, the names of the columns first; a dash where nobody told."""
    return [_HEAD, *(_cells(row) for row in rows)]


def _cells(row: Row) -> tuple[str, ...]:
    point = row.point
    first, middle, last = (seconds * 1e3 for seconds in point.step)
    ranks = str(point.ranks) if point.nodes == 1 else f"{point.nodes} x {point.ranks // point.nodes}"
    return (
        point.strategy or "(own)", ranks, f"{middle:.4g}", f"{first:.4g}..{last:.4g}", f"{point.throughput:.4g}",
        _said(point.epoch_seconds, "{:.4g}"), f"{row.speedup:.2f}", f"{row.efficiency:.0%}", f"{point.waiting:.0%}",
        _said(point.use, "{:.0%}"), _said(point.joules, "{:.3g}"),
    )  # fmt: skip


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def picture(rows: Sequence[Row], title: str) -> str:
    """Speed-up beside what it were at best, and efficiency, by ranks: one SVG."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.point.strategy or "(own)", []).append(row)
    least = min(row.point.ranks for row in rows)
    most = max(row.point.ranks for row in rows)
    ideal = most / least
    common: Any = {"groups": groups, "ranks": most}
    left = _panel("speed-up", **common, highest=ideal, read=_speedup, ideal=((least, 1.0), (most, ideal)))
    right = _panel("efficiency", **common, highest=1.0, read=_efficiency, ideal=((least, 1.0), (most, 1.0)))
    names = "".join(
        f'<text x="{_EDGE + 130 * number}" y="{_HIGH + 48}" fill="{_color(number)}">{escape(name)}</text>'
        for number, name in enumerate(groups)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDE} {_HIGH + 64}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>'
        f'<g transform="translate(0 20)">{left}<g transform="translate({_WIDE} 0)">{right}</g></g>{names}</svg>\n'
    )


def _speedup(row: Row) -> float:
    return row.speedup


def _efficiency(row: Row) -> float:
    return row.efficiency


def _panel(
    name: str,
    *,
    groups: dict[str, list[Row]],
    ranks: int,
    highest: float,
    read: Callable[[Row], float],
    ideal: tuple[tuple[int, float], tuple[int, float]],
) -> str:
    top = max([highest, *(read(row) for group in groups.values() for row in group)]) * 1.05

    def at(count: float, value: float) -> tuple[float, float]:
        return (
            _EDGE + (_WIDE - 2 * _EDGE) * count / ranks,
            _HIGH - _EDGE - (_HIGH - 2 * _EDGE) * value / top,
        )

    (left, bottom), (right, high) = at(0, 0), at(ranks, top)
    parts = [f'<text x="{left:.1f}" y="{high - 12:.1f}">{name}</text>']
    parts.append(f'<path d="M{left:.1f} {high:.1f}V{bottom:.1f}H{right:.1f}" fill="none" stroke="#555"/>')
    counts = sorted({row.point.ranks for group in groups.values() for row in group})
    parts += [
        f'<text x="{at(count, 0)[0]:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{count}</text>'
        for count in counts
    ]
    parts += [
        f'<text x="{left - 6:.1f}" y="{at(0, value)[1] + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        for value in (0, highest / 2, highest)
    ]
    parts.append(f'<text x="{(left + right) / 2:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">ranks</text>')
    (x0, y0), (x1, y1) = (at(*point) for point in ideal)
    parts.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#999" stroke-dasharray="4 4"/>')
    for number, group in enumerate(groups.values()):
        points = [at(row.point.ranks, read(row)) for row in group]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points)
        color = _color(number)
        parts.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="2"/><g fill="{color}">{dots}</g>')
    return "".join(parts)


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]
