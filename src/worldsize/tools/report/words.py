"""Room: numbers as people read them. Each kind of number has one way, so that a test can read the page again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ABSENT = "–"  # noqa: RUF001 - a dash, as tables have it
_WHOLE, _ALL = 10_000, 0.995
_SECOND, _SECONDS = 0.9995, 99.5
_STEP = 1000.0


def word(value: Any, kind: str) -> str:
    """A value as text; a dash where there is none."""
    return ABSENT if value is None else KINDS[kind](value)


def number(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.4g}"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """A share of one."""
    return f"{value * 100:.0f}%" if value >= _ALL or value == 0 else f"{value * 100:.1f}%"


def duration(value: float) -> str:
    """Seconds in the two units that matter."""
    if value < _SECOND:
        return f"{value * 1e3:.3g} ms"
    if value < _SECONDS:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {seconds:02d} s"
    days, of_day = divmod(hours, 24)
    return f"{days} d {of_day:02d} h" if days else f"{hours} h {rest:02d} min"


def size(value: float) -> str:
    """Bytes: `3.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < _STEP:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    return f"{value:.1f} TB"


def hours(value: float) -> str:
    """Device-seconds as hours."""
    return f"{value / 3600:.3g}"


def date(value: float) -> str:
    """Seconds since 1970, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))


KINDS: dict[str, Callable[[Any], str]] = {
    "number": number, "count": count, "percent": percent, "duration": duration, "size": size, "hours": hours, "date": date,
    "text": str,
}  # fmt: skip
