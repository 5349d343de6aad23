"""Room: the page: one file with everything in it, which asks nobody for anything."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from worldsize.tools.report import charts, sections, words
from worldsize.tools.report.html import BETWEEN, Facts, card, folded, keys, table

_COLORS = 6
_FIRST = (
    ("loss", "Loss", "number"), ("lr", "Learning rate", "number"), ("grad_norm", "Gradient norm", "number"),
    ("samples/s", "Throughput (samples/s)", "number"), ("tokens_per_s", "Tokens/s", "number"),
    ("tokens_per_second_per_device", "Tokens/s of a device", "number"), ("mfu", "MFU", "percent"),
)  # fmt: skip
_GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Own step time", "duration", ("step time", "step time, slowest rank")),
    ("Memory of a rank", "size", ("memory", "memory, most")),
    ("Device or cores in use", "number", ("use", "use, least")),
)
_LABELS = {
    "step time": "median rank", "step time, slowest rank": "slowest rank", "memory": "median rank", "memory, most": "most",
    "use": "median rank", "use, least": "least",
}  # fmt: skip
_ROWS = 12


def page(runs: list[dict[str, Any]]) -> str:
    """The whole text.

    Args:
        runs: what `summary` made of each.
    """
    facts = Facts({"runs": runs})
    body = _one(facts) if len(runs) == 1 else _several(facts)
    # What ends a script or opens a comment may not stand in one.
    data = json.dumps(facts.body, allow_nan=False).replace("<", "\\u003c")
    title = f"{', '.join(run['name'] for run in runs)} · worldsize report"
    parts = {name: _file(f"{name}.{kind}") for name, kind in (("style", "css"), ("script", "js"))}
    return Template(_file("page.html")).substitute(title=escape(title), data=data, body=body, **parts)


def _file(name: str) -> str:
    return (resources.files("worldsize.tools.report") / name).read_text(encoding="utf-8").rstrip()


def _one(facts: Facts) -> str:
    run = facts.get("runs", 0)
    return (
        f'<header class="top"><div class="head"><h1>{escape(run["name"])}</h1>{sections.pill(run)}</div>'
        f'<p class="verdict">{escape(run["verdict"])}</p>{sections.meter(run)}'
        f"{sections.tiles(facts, 'runs|0')}{sections.findings(run)}</header>"
        f'<main id="main">{sections.timeline(facts, "runs|0")}{_curves(facts)}'
        f'<div class="pair">{sections.split(facts, "runs|0")}'
        f'<div class="run">{sections.stragglers(facts, "runs|0")}{sections.checkpoints(facts, "runs|0")}</div></div>'
        f"{_devices(facts, 0)}"
        f"{sections.failed(facts, 'runs|0')}{sections.settings(facts, 'runs|0')}</main>{_footer(facts)}"
    )


def _several(facts: Facts) -> str:
    runs = facts.get("runs")
    names = [f"runs|{number}" for number in range(len(runs))]
    blocks = "".join(_column(facts, number, name) for number, name in enumerate(names))
    return (
        f'<header class="top"><h1>{len(runs)} runs</h1><p class="verdict">{escape(" and ".join(run["name"] for run in runs))}, '
        f'side by side.</p></header><main id="main">{card("At a glance", _glance(facts, names))}{_curves(facts)}'
        f'<div class="runs">{blocks}</div></main>{_footer(facts)}'
    )


def _column(facts: Facts, number: int, name: str) -> str:
    run = facts.get(name)
    parts = [
        sections.findings(run),
        sections.timeline(facts, name),
        sections.split(facts, name),
        sections.stragglers(facts, name),
    ]
    parts += [
        _devices(facts, number),
        sections.checkpoints(facts, name),
        sections.failed(facts, name),
        sections.settings(facts, name),
    ]
    return f'<div class="run" style="--k:var({_color(number)})"><h2>{escape(run["name"])}</h2>{"".join(parts)}</div>'


def _glance(facts: Facts, names: list[str]) -> str:
    kinds = (
        ("Steps", "made", "count"), ("Steps planned", "total", "count"), ("Loss", "loss", "number"),
        ("Samples/s", "speed|samples", "number"), ("MFU", "speed|mfu", "percent"), ("Goodput", "goodput", "percent"),
        ("Ranks", "ranks", "count"), ("Wall time", "wall", "duration"),
        ("Steps made again", "lost_steps", "count"), ("Save stall", "save_totals|stall", "duration"),
        ("Most memory", "devices|peak", "size"),
    )  # fmt: skip
    runs = [facts.get(name) for name in names]
    rows = [["State", *(sections.pill(run) for run in runs)], ["", *(escape(run["verdict"]) for run in runs)]]
    rows += [[title, *(facts.show(f"{name}|{place}", kind) for name in names)] for title, place, kind in kinds]
    return table("Runs side by side", ("", *(run["name"] for run in runs)), rows, text=range(1, len(names) + 1))


def _curves(facts: Facts) -> str:
    """Curves of what was logged: the well-known ones first."""
    runs = facts.get("runs")
    known = {name for name, _, _ in _FIRST} | {name for _, _, names in _GROUPS for name in names}
    others = dict.fromkeys(name for run in runs for name in run["series"] if name not in known)
    wanted = [*_FIRST, *((name, name, "number") for name in others)]
    drawn = [_chart(facts, title, kind, _lines(facts, name)) for name, title, kind in wanted]
    note = "Dashed lines mark where an attempt went on." if any(run["restarts"] for run in runs) else ""
    return card("Curves", f'<div class="charts">{"".join(drawn)}</div>', note)


def _devices(facts: Facts, number: int) -> str:
    run, parts = f"runs|{number}", []
    for title, kind, names in _GROUPS:
        series = facts.get(run, "series")
        lines = [
            charts.Line(
                _LABELS[name], f"{run}|series|{name}", series[name], "--c0" if place == 0 else "--c1", thin=place > 0
            )
            for place, name in enumerate(names)
            if name in series
        ]
        parts.append(_chart(facts, title, kind, lines))
    body = f'<div class="charts">{"".join(parts)}</div>{sections.devices(facts, run)}'
    return card("Devices and steps over time", body) if any(parts) else ""


def _lines(facts: Facts, name: str) -> list[charts.Line]:
    runs, several = facts.get("runs"), len(facts.get("runs")) > 1
    return [
        charts.Line(
            run["name"] if several else name,
            BETWEEN.join(("runs", str(number), "series", name)),
            run["series"][name],
            _color(number),
            thin=number > 0,
        )
        for number, run in enumerate(runs)
        if name in run["series"]
    ]


def _chart(facts: Facts, title: str, kind: str, lines: list[charts.Line]) -> str:
    lines = [line for line in lines if line.values]
    if not lines:
        return ""
    last = f"{lines[0].path}|y|{_last(lines[0])}"
    now = f'<span class="soft">last <b>{facts.show(last, kind)}</b></span>' if len(lines) == 1 else ""
    legend = keys((line.label, line.color, "line") for line in lines) if len(lines) > 1 else now
    restarts = (
        []
        if len(facts.get("runs")) > 1
        else [each["first"] for each in facts.get("runs|0|attempts")[1:] if each["started"] is not None]
    )
    shown = "".join(_numbers(facts, line, kind) for line in lines)
    head = f"<figcaption><h3>{escape(title)}</h3>{legend}</figcaption>"
    return f"<figure>{head}{charts.plot(lines, kind, restarts)}{folded('Numbers', shown)}</figure>"


def _last(line: charts.Line) -> int:
    return max(number for number, value in enumerate(line.points["y"]) if value is not None)


def _numbers(facts: Facts, line: charts.Line, kind: str) -> str:
    size = len(line.points["x"])
    chosen = sorted({round(number * (size - 1) / max(min(size, _ROWS) - 1, 1)) for number in range(min(size, _ROWS))})
    rows = [
        [facts.show(f"{line.path}|x|{number}", "count"), facts.show(f"{line.path}|y|{number}", kind)]
        for number in chosen
    ]
    return table(
        line.label if size <= _ROWS else f"{line.label}, {len(rows)} of {size} points", ("Step", line.label), rows
    )


def _footer(facts: Facts) -> str:
    read = words.date(max(run["read"] for run in facts.get("runs")))
    where = "; ".join(escape(run["folder"]) for run in facts.get("runs"))
    return f"<footer>Read from {where} at {read} UTC. A killed attempt ends with the last sign that it gave.</footer>"


def _color(number: int) -> str:
    return f"--c{number % _COLORS}"
