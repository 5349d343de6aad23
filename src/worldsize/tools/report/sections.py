"""Room: the sections of the page about one run. Each takes the facts and the place of its run in them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from worldsize.tools.report.html import Facts, card, folded, keys, table
from worldsize.tools.report.words import count, duration, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

PILLS = {"finished": "Finished", "running": "Running", "stopped": "Stopped", "failed": "Failed", "lost": "Lost"}
_MARKS = {"bad": "!", "warn": "!", "note": "i"}
_PHASES = {
    "data": "Data wait", "compute": "Forward and backward", "collectives": "Waiting for other ranks", "optimizer": "Optimizer",
    "save": "Save stall", "evaluation": "Evaluation", "other": "The rest",
}  # fmt: skip
_MANY = 16


def pill(run: dict[str, Any]) -> str:
    """The state, in a word and a colour."""
    return f'<span class="pill {run["level"]}">{PILLS[run["status"]]}</span>'


def tiles(facts: Facts, run: str) -> str:
    """What one looks for first."""
    body, hours = facts.get(run), "GPU-hours" if facts.get(run, "gpu") else "rank-hours"
    show = facts.under(run)
    found = [
        ("Step", show("made", "count"), f"of {show('total', 'count')}" if body["total"] else "no end is known"),
        ("Loss", show("loss", "number"), "at the last step"),
        ("Throughput", f"{show('speed|samples', 'number')}/s", f"samples, {show('speed|steps', 'number')} steps/s"),
    ]
    if body["speed"]["tokens"] is not None:
        found.append(("Tokens", f"{show('speed|tokens', 'number')}/s", "a device"))
    if body["speed"]["mfu"] is not None:
        found.append(("MFU", show("speed|mfu", "percent"), "of the peak FLOP/s"))
    found += [
        ("Goodput", show("goodput", "percent"), f"of {show('device_seconds', 'hours')} {hours}"),
        ("Restarts", str(len(body["restarts"])), f"{show('lost_steps', 'count')} steps made again"),
        ("Wall time", show("wall", "duration"), f"on {show('ranks', 'count')} ranks"),
    ]
    items = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>' for name, value, more in found
    )
    return f'<dl class="tiles">{items}</dl>'


def meter(run: dict[str, Any]) -> str:
    """How far it is, as a line."""
    if run["progress"] is None:
        return ""
    share = min(run["progress"], 1.0) * 100
    return (
        f'<div class="meter" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{share:.0f}"><i style="width:{share:.2f}%"></i></div>'
    )


def findings(run: dict[str, Any]) -> str:
    """What to look at."""
    items = "".join(
        f'<li class="{each["level"]}"><span class="mark" aria-hidden="true">{_MARKS[each["level"]]}</span>'
        f'<b>{escape(each["title"])}</b><span class="detail">{escape(each["detail"])}</span></li>'
        for each in run["findings"]
    )
    return f'<ul class="findings" aria-label="What to look at">{items}</ul>' if items else ""


def timeline(facts: Facts, run: str) -> str:
    """Attempts over time, and what each restart cost."""
    body = facts.get(run)
    first = min(each["began"] - each["wait"] for each in body["attempts"])
    length = max(body["ended"] - first, 1e-9)
    lanes = "".join(_lane(body, each, first, length) for each in body["attempts"])
    ticks = "".join(
        f'<span class="x {kind}" style="left:{share * 100:.0f}%">{duration(share * length) if share else "0"}</span>'
        for share, kind in ((0.0, "begin"), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, "end"))
    )
    legend = keys(
        [
            ("training that counts", "--kept", ""), ("start-up", "--startup", ""), ("made again later", "--again", ""),
            ("waiting", "--hatch", "hatch"), ("failure", "--bad", ""),
        ]
    )  # fmt: skip
    parts = [
        f'<div class="lanes">{lanes}</div><div class="ticks" aria-hidden="true">{ticks}</div>',
        legend,
        _attempts(facts, run),
    ]
    if body["restarts"]:
        parts.append(_restarts(facts, run))
    return card(
        "Timeline", "".join(parts), "Each attempt from its start to its last sign; light notches are checkpoints."
    )


def _lane(body: dict[str, Any], attempt: dict[str, Any], first: float, length: float) -> str:
    began, ended = attempt["began"], attempt["ended"]
    started = ended if attempt["started"] is None else attempt["started"]
    good = started + attempt["good"]
    pieces = [
        ("waiting", began - attempt["wait"], began, "--hatch", "hatch"), ("start-up", began, started, "--startup", ""),
        ("training", started, good, "--kept", ""), ("made again", good, ended, "--again", ""),
    ]  # fmt: skip

    def place(when: float) -> float:
        return (when - first) / length * 100

    bars = "".join(
        f'<i class="{kind}" style="left:{place(begin):.3f}%;width:{place(end) - place(begin):.3f}%;--k:var({color})" '
        f'title="{name}: {duration(end - begin)}"></i>'
        for name, begin, end, color, kind in pieces
        if end > begin
    )
    marks = "".join(
        f'<u style="left:{place(save["time"]):.3f}%"></u>'
        for save in body["saves"]
        if save["attempt"] == attempt["number"]
    )
    end = (
        f'<b style="left:{place(ended):.3f}%" title="{escape(attempt["why"])}"></b>'
        if attempt["how"] in ("failed", "lost")
        else ""
    )
    how = f"{escape(attempt['how'])}, {attempt['ranks']} ranks"
    return (
        f'<div class="lane"><span>Attempt {attempt["number"]} <small>{how}</small></span>'
        f'<div class="track" aria-hidden="true">{bars}{marks}{end}</div></div>'
    )


def _attempts(facts: Facts, run: str) -> str:
    def row(number: int, each: dict[str, Any]) -> list[str]:
        show = facts.under(f"{run}|attempts|{number}")
        why = f": {escape(each['why'])}" if each["how"] == "failed" else ""
        waited = " queued" if each["queued"] else ""
        job = f" (job {escape(each['job'])})" if each["job"] else ""
        return [
            f"{show('number', 'count')}{job}", show("began", "date"), f"{show('wait', 'duration')}{waited}",
            show("startup", "duration"), f"{show('first', 'count')} to {show('made', 'count')}",
            show("held", "duration"), show("ranks", "count"), f"{escape(each['how'])}{why}", escape(each["hosts"]),
        ]  # fmt: skip

    heads = (
        "Attempt",
        "Began (UTC)",
        "Waited before",
        "Start-up",
        "Steps",
        "Held devices for",
        "Ranks",
        "Ended",
        "Hosts",
    )
    rows = [row(number, each) for number, each in enumerate(facts.get(run, "attempts"))]
    return folded("Attempts as a table", table("Attempts", heads, rows, text=(7, 8)))


def _restarts(facts: Facts, run: str) -> str:
    hours = "GPU-hours lost" if facts.get(run, "gpu") else "Rank-hours lost"

    def row(number: int) -> list[str]:
        show = facts.under(f"{run}|restarts|{number}")
        kinds = {"after": "count", "how": "text", "steps": "count", "again": "duration", "down": "duration"}
        return [
            *(show(name, kind) for name, kind in kinds.items()),
            show("startup", "duration"),
            show("device_seconds", "hours"),
        ]

    rows = [row(number) for number in range(len(facts.get(run, "restarts")))]
    show = facts.under(run)
    rows.append(["All", "", show("lost_steps", "count"), "", "", "", show("lost_device_seconds", "hours")])
    heads = ("After attempt", "which", "Steps made again", "in which", "Down for", "Start-up after", hours)
    return table("What each restart cost", heads, rows, text=(1,))


def split(facts: Facts, run: str) -> str:
    """Where the time goes."""
    phases = facts.get(run, "phases")
    if not phases:
        return card("Where the time goes", '<p class="soft">Nothing was measured yet.</p>')
    bars = "".join(
        f'<i style="flex:{each["share"]:.5f};--k:var(--{each["name"]})" title="{_PHASES[each["name"]]}"></i>'
        for each in phases
    )

    def row(number: int, each: dict[str, Any]) -> list[str]:
        show = facts.under(f"{run}|phases|{number}")
        name = f'<i class="key" style="--k:var(--{each["name"]})"></i>{_PHASES[each["name"]]}'
        return [
            name,
            show("share", "percent"),
            show("median", "duration"),
            show("least", "duration"),
            show("most", "duration"),
        ]

    rows = [row(number, each) for number, each in enumerate(phases)]
    body = f'<div class="bar" aria-hidden="true">{bars}</div>' + table(
        "Seconds by phase", ("", "Share", "Median rank", "Least", "Most"), rows
    )
    return card("Where the time goes", body, "Of the training loop, over all attempts; the range is that over ranks.")


def stragglers(facts: Facts, run: str) -> str:
    """Each rank's step: its own work, and waiting for the others."""
    ranks = facts.get(run, "by_rank")
    if not ranks:
        return card("Step time by rank", '<p class="soft">Nothing was measured, or there are more than 64 ranks.</p>')
    longest = max(each["step"]["mean"] for each in ranks)

    def lane(number: int, each: dict[str, Any]) -> str:
        own, whole = (each[name]["mean"] / longest * 100 for name in ("own", "step"))
        return (
            f'<div class="lane rank"><span>Rank {each["rank"]}</span><div class="track" aria-hidden="true">'
            f'<i style="left:0;width:{own:.2f}%;--k:var(--compute)"></i>'
            f'<i class="hatch" style="left:{own:.2f}%;width:{max(whole - own, 0):.2f}%"></i></div>'
            f"<em>{facts.show(f'{run}|by_rank|{number}|own|mean', 'duration')}</em></div>"
        )

    def row(number: int, each: dict[str, Any]) -> list[str]:
        show = facts.under(f"{run}|by_rank|{number}")
        own = [show(f"own|{name}", "duration") for name in ("least", "mean", "most")]
        return [f"{each['rank']}", *own, show("step|mean", "duration"), show("step|most", "duration")]

    many = " many" if len(ranks) > _MANY else ""
    lanes = "".join(lane(number, each) for number, each in enumerate(ranks))
    heads = ("Rank", "Own: least", "Own: mean", "Own: most", "Step: mean", "Step: most")
    rows = [row(number, each) for number, each in enumerate(ranks)]
    body = f'<div class="lanes{many}">{lanes}</div>'
    body += keys([("its own work", "--compute", ""), ("waiting for other ranks", "--hatch", "hatch")])
    body += folded("As a table", table("Seconds of a step", heads, rows))
    return card(
        "Step time by rank", body, "Ranks end a step together: a slow one works long, and the others wait for it."
    )


def devices(facts: Facts, run: str) -> str:
    """Memory and use, in a line."""
    found = facts.get(run, "devices")
    if found["memory"] is None:
        return ""
    where = "GPU memory" if facts.get(run, "gpu") else "Host memory of a rank"
    show = facts.under(f"{run}|devices")
    use = show("use", "percent") if facts.get(run, "gpu") else f"{show('use', 'number')} cores"
    rows = [
        [f"{where}, most at a time", show("peak", "size")],
        [f"{where}, most when looked at", show("memory", "size")],
    ]
    rows += [["In use, mean of the median rank", use]] if found["use"] is not None else []
    return table("Devices", ("", "Over all ranks"), rows)


def checkpoints(facts: Facts, run: str) -> str:
    """Sizes, seconds, stalls."""
    saves = facts.get(run, "saves")
    if not saves:
        return card("Checkpoints", '<p class="soft">None was committed.</p>')
    show = facts.under(run)
    line = (
        f"<p>{show('save_totals|count', 'count')} checkpoints, the last of {show('save_totals|bytes', 'size')}; a save takes "
        f"{show('save_totals|mean', 'duration')} and all of them held training up for {show('save_totals|stall', 'duration')} "
        f"({show('save_totals|share', 'percent')} of the time).</p>"
    )
    most = max(each["seconds"] for each in saves) or 1.0
    lanes = "".join(_saved(facts, run, number, most) for number in range(max(0, len(saves) - 8), len(saves)))
    heads = ("Step", "Attempt", "Size", "Took", "Held training up")
    kinds = {"step": "count", "attempt": "count", "bytes": "size", "seconds": "duration", "stall": "duration"}
    rows = [[show(f"saves|{number}|{name}", kind) for name, kind in kinds.items()] for number in range(len(saves))]
    legend = keys([("written beside training", "--startup", ""), ("training held up", "--save", "")])
    return card(
        "Checkpoints",
        f'{line}<div class="lanes">{lanes}</div>{legend}'
        + folded("All as a table", table("Checkpoints", heads, rows)),
    )


def _saved(facts: Facts, run: str, number: int, most: float) -> str:
    save = facts.get(run, "saves", number)
    whole, stall = save["seconds"] / most * 100, min(save["stall"], save["seconds"]) / most * 100
    return (
        f'<div class="lane rank"><span>Step {facts.show(f"{run}|saves|{number}|step", "count")}</span>'
        f'<div class="track" aria-hidden="true"><i style="left:0;width:{stall:.2f}%;--k:var(--save)"></i>'
        f'<i style="left:{stall:.2f}%;width:{whole - stall:.2f}%;--k:var(--startup)"></i></div>'
        f"<em>{facts.show(f'{run}|saves|{number}|seconds', 'duration')}</em></div>"
    )


def failed(facts: Facts, run: str) -> str:
    """What failed, with its class."""
    found = facts.get(run, "failures")
    if not found:
        return ""
    items = "".join(
        f'<div class="failure"><span class="tag">{escape(str(each["ending"]))}</span> '
        f"<small>attempt {facts.show(f'{run}|failures|{number}|attempt', 'count')}, "
        f"{facts.show(f'{run}|failures|{number}|time', 'date')} UTC</small><code>{escape(each['line'])}</code></div>"
        for number, each in enumerate(found)
    )
    return card("Failures", items, name="failures")


def settings(facts: Facts, run: str) -> str:
    """Configuration and environment; where attempts differ, a value for each."""
    found = facts.get(run, "settings")
    if not found:
        return ""
    count_ = len(found[0]["values"])
    differing = [(number, each) for number, each in enumerate(found) if each["differs"]]
    same = [(number, each) for number, each in enumerate(found) if not each["differs"]]
    body = ""
    if differing:
        heads = ("", *(f"Start {number}" for number in range(count_)))
        rows = [[escape(each["name"]), *_values(facts, run, number, count_)] for number, each in differing]
        told = table("Where attempts differ", heads, rows, text=range(1, count_ + 1))
        body += told.replace("<tbody><tr>", '<tbody><tr class="differs">').replace(
            "</tr><tr>", '</tr><tr class="differs">'
        )
    rows = [[escape(each["name"]), *_values(facts, run, number, 1)] for number, each in same]
    body += table("The same in all attempts" if count_ > 1 else "Of the one attempt", ("", "Value"), rows, text=(1,))
    return card("Configuration and environment", body)


def _values(facts: Facts, run: str, number: int, count_: int) -> Iterator[str]:
    return (facts.show(f"{run}|settings|{number}|values|{which}", "text") for which in range(count_))


def lost(run: dict[str, Any]) -> str:
    """In words: what restarts cost, for the table of several runs."""
    share = run["lost_device_seconds"] / run["device_seconds"] if run["device_seconds"] else 0.0
    return f"{count(run['lost_steps'])} steps, {percent(share)} of the device time"
