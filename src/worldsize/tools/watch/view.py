"""Room: how a run stands, in a few lines for a terminal or in one for a file. Pure."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from worldsize.config import Duration
from worldsize.errors import ConfigError
from worldsize.tools.report import reading
from worldsize.tools.report.words import count, duration, number, percent, size, word

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worldsize.tools.report.reading import Row, RunFacts

Part = tuple[str, str]
"""Words, and how they are set: a style of rich, or nothing."""

_BARS = "▁▂▃▄▅▆▇█"
_POINTS, _RANKS, _HOSTS, _LINE = 40, 12, 3, 240
_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "bold red", "lost": "bold red"}
_SHOWN = ("lr", "grad_norm", "mfu", "tokens_per_s", "tokens_per_second_per_device")


def lines(run: RunFacts, width: int = 80) -> Iterator[list[Part]]:
    """All there is to see."""
    yield [(run.name, "bold"), ("  ", ""), (run.last.how, _STYLES[run.last.how]), (f"  {_where(run)}", "dim")]
    yield _bar(run, width)
    yield from _numbers(run)
    yield [("checkpoint  ", "dim"), (_saves(run), "")]
    yield from _ranks(run)
    yield from _past(run)


def line(run: RunFacts) -> str:
    """The same in one line."""
    of = f"/{run.total}" if run.total else ""
    parts = [f"step {run.last.made}{of}", *(f"{name} {number(value)}" for name, value in _latest(run).items())]
    parts += [f"{number(speed)} samples/s"] if (speed := _speed(run)) else []
    parts += [f"slowest rank {slow}"] if (slow := _slowest(run)) is not None else []
    return "  ".join([*parts, f"attempt {run.last.number}", run.last.how])


def sparkline(values: Sequence[float], points: int = _POINTS) -> str:
    """The course of numbers, each character the mean of a stretch; a blank where it is not finite."""
    stretch = max(1, math.ceil(len(values) / points))
    means = [sum(part) / len(part) for at in range(0, len(values), stretch) if (part := values[at : at + stretch])]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite) / 2, max(finite) / 2  # halves: the difference of two numbers may be too large for one
    shares = [(value / 2 - low) / (high - low or 1.0) for value in means]
    return "".join(_BARS[round(share * (len(_BARS) - 1))] if math.isfinite(share) else " " for share in shares)


def next_save(run: RunFacts) -> int | None:
    """The step of the next checkpoint that the settings ask for; None where time decides, or nothing does."""
    facts = run.last.facts
    config, epoch = facts.get("config", {}), facts.get("steps_per_epoch")
    try:
        every = Duration.parse(str(config.get("save every")))
    except ConfigError:
        return run.total
    batch = int(config.get("global_batch") or 1)
    steps = {"st": every.count, "ep": every.count * epoch if epoch else None, "sa": max(1, every.count // batch)}.get(
        every.unit
    )
    if not steps:
        return run.total
    wanted = (run.last.made // steps + 1) * steps
    return min(wanted, run.total) if run.total else wanted


def _where(run: RunFacts) -> str:
    if run.last.started is None:
        return (
            f"attempt {run.last.number}, {'starting' if run.last.how == 'running' else 'ended before its first step'}"
        )
    hosts = run.last.facts.get("hosts", [])
    named = ", ".join(hosts[:_HOSTS]) + (f" and {len(hosts) - _HOSTS} more" if len(hosts) > _HOSTS else "")
    job = f", job {run.last.job}" if run.last.job else ""
    return f"attempt {run.last.number}, {run.last.ranks} ranks on {named}{job}"


def _bar(run: RunFacts, width: int) -> list[Part]:
    made = run.last.made
    if not run.total:
        return [(f"step {count(made)}", "")]
    share, room = min(made / run.total, 1.0), max(10, min(40, width - 46))
    full = int(share * room)
    left = _left(run)
    ends = f"  {duration(left)} left" if left is not None and run.last.how == "running" else ""
    told = f"  {count(made)} of {count(run.total)} steps, {percent(share)}{ends}"
    return [("━" * full, "green"), ("─" * (room - full), "dim"), (told, "")]


def _left(run: RunFacts) -> float | None:
    """Seconds to the end, at the speed of the last intervals."""
    rows = _of_last(run, run.times)[-20:]
    steps, seconds = sum(row["steps"] for row in rows), sum(row["seconds"] for row in rows)
    return (run.total - run.last.made) * seconds / steps if run.total and steps else None


def _numbers(run: RunFacts) -> Iterator[list[Part]]:
    losses = [value for _, value in reading.curves(run.metrics).get("loss", [])]
    if losses:
        yield [
            ("loss        ", "dim"),
            (number(losses[-1]) if math.isfinite(losses[-1]) else "not finite", "bold"),
            (f"  {sparkline(losses)}", "cyan"),
        ]
    speed = _speed(run)
    parts = [f"{number(speed)} samples/s"] if speed else []
    parts += [f"{name} {number(value)}" for name, value in _latest(run).items() if name != "loss"]
    if parts:
        yield [("now         ", "dim"), ("  ".join(parts), "")]


def _latest(run: RunFacts) -> dict[str, float]:
    found = {}
    for name in ("loss", *_SHOWN):
        row = next((row for row in reversed(run.metrics) if name in row), None)
        if row is not None:
            found[name] = float(row[name])
    return found


def _speed(run: RunFacts) -> float | None:
    rows = _of_last(run, run.times)[-5:]
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["samples"] for row in rows) / seconds if seconds else None


def _of_last(run: RunFacts, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["attempt"] == run.last.number]


def _slowest(run: RunFacts) -> int | None:
    rows = _of_last(run, run.times)
    return rows[-1]["slowest"] if rows and rows[-1]["ranks"] > 1 else None


def _saves(run: RunFacts) -> str:
    saves, coming = reading.saves(run.events), next_save(run)
    last = saves[-1] if saves else None
    told = (
        f"last at step {count(last['step'])} ({size(last['bytes'])} in {duration(last['seconds'])})"
        if last
        else "none yet"
    )
    if run.last.how != "running" or coming is None:
        return told
    minutes = run.last.facts.get("config", {}).get("save every minutes")
    return f"{told}, next at step {count(coming)}" + (f" or after {minutes:g} minutes" if minutes else "")


def _ranks(run: RunFacts) -> Iterator[list[Part]]:
    rows = _of_last(run, run.times)
    if not rows:
        return
    row = rows[-1]
    use = "use" if run.last.gpu else "cores"
    yield [(f"{'rank':<6}{'own step':>10}{'step':>10}{'memory':>10}{'most':>10}{use:>8}", "dim")]
    each = row.get("by_rank")
    if each is None:
        yield [
            (f"{'median':<6}{duration(row['own'][1]):>10}", ""),
            (f"  slowest: rank {row['slowest']}, {duration(row['own'][2])}", "yellow"),
        ]
        return
    order = sorted(range(row["ranks"]), key=lambda rank: -each["own"][rank][4])[:_RANKS]
    for rank in sorted(order):
        told = [
            duration(each["own"][rank][4]),
            duration(each["step"][rank][4]),
            size(each["memory"][rank]),
            size(each["peak"][rank]),
            _use(each["use"][rank], gpu=run.last.gpu),
        ]
        slow = rank == row["slowest"] and row["ranks"] > 1
        yield [
            (
                f"{rank:<6}"
                + "".join(f"{text:>{room}}" for text, room in zip(told, (10, 10, 10, 10, 8), strict=True)),
                "",
            ),
            ("  slowest" if slow else "", "yellow"),
        ]
    if row["ranks"] > _RANKS:
        yield [(f"and {row['ranks'] - _RANKS} faster ranks", "dim")]


def _use(value: float, *, gpu: bool) -> str:
    return word(None if value < 0 else value, "percent" if gpu else "number")


def _past(run: RunFacts) -> Iterator[list[Part]]:
    if run.restarts:
        lost = sum(each.steps for each in run.restarts)
        yield [("restarts    ", "dim"), (f"{len(run.restarts)}, {count(lost)} steps made again", "")]
    failures = reading.failures(run)
    if failures:
        last: dict[str, Any] = failures[-1]
        yield [
            ("failure     ", "dim"),
            (f"attempt {last['attempt']}: ", ""),
            (textwrap.shorten(str(last["line"]), _LINE, placeholder=" ..."), "red"),
        ]
