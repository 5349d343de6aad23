"""Room: all that the page shows of a run, as plain values: the page holds them as JSON, and shows nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from worldsize.tools.report import health, reading

if TYPE_CHECKING:
    from worldsize.tools.report.reading import Attempt, Row, RunFacts

POINTS = 1200
"""Of a longer curve the least and most value of each stretch are kept."""
_TOKENS = ("tokens_per_s", "tokens_per_second", "tokens_per_second_per_device")


def summary(run: RunFacts) -> dict[str, Any]:
    """Plain values, without NaN."""
    curves = reading.curves(run.metrics)
    body: dict[str, Any] = {
        "name": run.name, "folder": run.folder, "id": run.id, "read": run.read,
        "status": run.last.how, "made": run.last.made, "total": run.total,
        "ranks": run.last.ranks, "gpu": run.last.gpu,
        "began": run.attempts[0].began, "ended": run.last.ended, "wall": run.last.ended - run.attempts[0].began,
        "loss": _last(curves.get("loss")),
        "samples": max((row["samples"] for row in run.metrics if "samples" in row), default=None),
        "speed": _speed(run), "goodput": reading.goodput(run.attempts),
        "device_seconds": sum(each.held * each.ranks for each in run.attempts),
        "attempts": [_attempt(each) for each in run.attempts],
        "restarts": [{name: getattr(each, name) for name in each.__slots__} for each in run.restarts],
        "phases": _phases(run.times), "by_rank": _ranks(run.times), "devices": _devices(run.times),
        "saves": [_save(row) for row in reading.saves(run.events)],
        "failed_saves": [row.get("error", "") for row in run.events if row["event"] == "save failed"],
        "failures": [_failure(row) for row in reading.failures(run)],
        "settings": _settings(run.attempts),
        "series": {name: _curve(points) for name, points in {**curves, **_measured(run)}.items()},
        "not_finite": _not_finite(curves.get("loss", [])),
    }  # fmt: skip
    body["lost_steps"] = sum(each.steps for each in run.restarts)
    body["lost_device_seconds"] = sum(each.device_seconds for each in run.restarts)
    body["progress"] = body["made"] / run.total if run.total else None
    body["save_totals"] = _save_totals(body["saves"], body["attempts"])
    return body | health.judge(body)


def _attempt(each: Attempt) -> dict[str, Any]:
    names = (
        "number",
        "began",
        "started",
        "ended",
        "first",
        "made",
        "kept",
        "ranks",
        "wait",
        "queued",
        "how",
        "why",
        "good",
        "again",
        "job",
    )
    hosts = ", ".join(each.facts.get("hosts", []))
    return {name: getattr(each, name) for name in names} | {
        "startup": each.startup,
        "held": each.held,
        "hosts": hosts,
    }


def _speed(run: RunFacts) -> dict[str, Any]:
    rows = [row for row in run.times if row["attempt"] == run.times[-1]["attempt"]] if run.times else []
    seconds, curves = sum(row["seconds"] for row in rows), reading.curves(run.metrics)
    tokens = next((curves[name] for name in _TOKENS if name in curves), None)
    return {
        "samples": sum(row["samples"] for row in rows) / seconds if seconds else None,
        "steps": sum(row["steps"] for row in rows) / seconds if seconds else None,
        "tokens": _last(tokens),
        "mfu": _last(curves.get("mfu")),
    }


def _phases(rows: list[Row]) -> list[dict[str, Any]]:
    found = reading.phases(rows)
    whole = sum(median for _, median, _ in found.values())
    return [
        {"name": name, "least": least, "median": median, "most": most, "share": median / whole if whole else 0.0}
        for name, (least, median, most) in found.items()
    ]


def _ranks(rows: list[Row]) -> list[dict[str, Any]]:
    own, whole = reading.ranks(rows, "own"), reading.ranks(rows, "step")
    return [
        {"rank": rank, "own": mine, "step": step} for rank, (mine, step) in enumerate(zip(own, whole, strict=True))
    ]


def _devices(rows: list[Row]) -> dict[str, Any]:
    use = [row["use"] for row in rows if row["use"][0] >= 0]
    return {
        "memory": max((row["memory"][2] for row in rows), default=None),
        "peak": max((row["peak"][2] for row in rows), default=None),
        "use": sum(each[1] for each in use) / len(use) if use else None,
    }


def _measured(run: RunFacts) -> dict[str, list[tuple[int, float]]]:
    """Curves of what was measured and not logged."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in run.times:
        values = {
            "samples/s": row["samples"] / row["seconds"], "memory": row["memory"][1], "memory, most": row["memory"][2],
            "step time": row["own"][1], "step time, slowest rank": row["own"][2],
        }  # fmt: skip
        values |= {"use": row["use"][1], "use, least": row["use"][0]} if row["use"][0] >= 0 else {}
        for name, value in values.items():
            found.setdefault(name, []).append((row["step"], value))
    return {name: sorted(dict(points).items()) for name, points in found.items()}


def _save(row: Row) -> dict[str, Any]:
    return {name: row.get(name) for name in ("step", "bytes", "seconds", "stall", "attempt", "time")}


def _save_totals(saves: list[dict[str, Any]], attempts: list[dict[str, Any]]) -> dict[str, Any]:
    stall, held = sum(each["stall"] for each in saves), sum(each["held"] for each in attempts)
    seconds = [each["seconds"] for each in saves]
    return {
        "count": len(saves), "stall": stall, "share": stall / held if held else 0.0,
        "mean": sum(seconds) / len(seconds) if seconds else None, "bytes": saves[-1]["bytes"] if saves else None,
    }  # fmt: skip


def _failure(row: Row) -> dict[str, Any]:
    return {name: row.get(name) for name in ("attempt", "ending", "line", "host", "rank", "time")}


def _settings(attempts: list[Attempt]) -> list[dict[str, Any]]:
    """Configuration and environment by name: a value for each attempt that told it, and whether they differ."""
    told = [each for each in attempts if each.facts]
    flat = [_flat(each.facts) for each in told]
    names = list(dict.fromkeys(name for each in flat for name in each))
    found = []
    for name in names:
        values = [each.get(name, "") for each in flat]
        found.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return found


def _flat(facts: Row) -> dict[str, str]:
    parts: dict[str, Any] = {**facts.get("config", {}), "command": " ".join(map(str, facts.get("command", [])))}
    parts |= {f"layout: {name}": value for name, value in facts.get("layout", {}).items()}
    parts |= {name: facts.get(name) for name in ("ranks", "hosts", "devices", "launcher", "job")}
    parts |= {f"environment: {name}": value for name, value in facts.get("environment", {}).items()}
    return {name: _text(value) for name, value in parts.items() if value not in (None, [])}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _curve(points: list[tuple[int, float]]) -> dict[str, list[Any]]:
    kept = points if len(points) <= POINTS else _thinned(points)
    return {"x": [step for step, _ in kept], "y": [value if math.isfinite(value) else None for _, value in kept]}


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    size = -(-len(points) // (POINTS // 2))
    kept: set[tuple[int, float]] = {points[0], points[-1]}
    for at in range(0, len(points), size):
        finite = [each for each in points[at : at + size] if math.isfinite(each[1])]
        if finite:
            kept |= {min(finite, key=lambda each: each[1]), max(finite, key=lambda each: each[1])}
    return sorted(kept)


def _last(points: list[tuple[int, float]] | None) -> float | None:
    finite = [value for _, value in points or [] if math.isfinite(value)]
    return finite[-1] if finite else None


def _not_finite(points: list[tuple[int, float]]) -> int | None:
    return next((step for step, value in points if not math.isfinite(value)), None)
