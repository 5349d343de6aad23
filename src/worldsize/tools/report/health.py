"""Room: what to make of a run: one sentence, one colour, and what a person should look at. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worldsize.tools.report.words import count, duration, percent

if TYPE_CHECKING:
    from collections.abc import Callable

_SLOW, _DATA, _STALL, _WASTE, _WAITING = 0.10, 0.10, 0.02, 0.10, 0.25
"""From which share on it is worth a word: a slow rank, data wait, save stalls, lost device time, waiting for others."""

Finding = dict[str, str]


def judge(body: dict[str, Any]) -> dict[str, Any]:
    """`verdict` (a sentence), `level` (good, warn, bad, live) and `findings`, each with a level, a title and what to do."""
    findings = [finding for look in _LOOKS if (finding := look(body)) is not None]
    level = _LEVELS[body["status"]]
    if level in ("good", "live") and any(each["level"] != "note" for each in findings):
        level = "warn" if level == "good" else level
    return {"verdict": _sentence(body), "level": level, "findings": findings}


_LEVELS = {"finished": "good", "running": "live", "stopped": "warn", "failed": "bad", "lost": "bad"}


def _sentence(body: dict[str, Any]) -> str:
    of = f" of {count(body['total'])}" if body["total"] else ""
    at = f"step {count(body['made'])}{of}"
    first = {
        "finished": f"Finished at {at}.",
        "running": f"Running, at {at}.",
        "stopped": f"Stopped on request at {at}; start it again to go on.",
        "failed": f"Failed at {at}: {body['attempts'][-1]['why']}.",
        "lost": f"Ended without a word at {at}: killed, or its machine went away.",
    }[body["status"]]
    again = len(body["restarts"])
    if not again:
        return first
    times = "Restarted once" if again == 1 else f"Restarted {again} times"
    lost = f"{count(body['lost_steps'])} steps were made again" if body["lost_steps"] else "no step was lost"
    return f"{first} {times}; {lost}."


def _not_finite(body: dict[str, Any]) -> Finding | None:
    step = body["not_finite"]
    if step is None:
        return None
    return _found(
        "bad", f"The loss is no finite number from step {step} on", "Look at the samples and the learning rate there."
    )


def _failed(body: dict[str, Any]) -> Finding | None:
    if not body["failures"]:
        return None
    last, number = body["failures"][-1], len(body["failures"])
    title = "An attempt failed" if number == 1 else f"{number} attempts failed"
    return _found("bad" if body["status"] in ("failed", "lost") else "warn", title, f"The last: {last['line']}")


def _lost_time(body: dict[str, Any]) -> Finding | None:
    share = body["lost_device_seconds"] / body["device_seconds"] if body["device_seconds"] else 0.0
    if share < _WASTE:
        return None
    return _found(
        "warn",
        f"Restarts cost {percent(share)} of the device time",
        "Save more often, or find what ends the attempts.",
    )


def _slow_rank(body: dict[str, Any]) -> Finding | None:
    ranks = body["by_rank"]
    if len(ranks) <= 1:
        return None
    means = sorted(each["own"]["mean"] for each in ranks)
    typical, slowest = means[(len(means) - 1) // 2], max(ranks, key=lambda each: each["own"]["mean"])
    over = slowest["own"]["mean"] / typical - 1 if typical else 0.0
    if over < _SLOW:
        return None
    return _found(
        "warn",
        f"Rank {slowest['rank']} needs {percent(over)} more time for a step than is usual",
        "The others wait for it: look at its host, its device and its share of the data.",
    )


def _share(name: str, least: float, title: str, do: str) -> Callable[[dict[str, Any]], Finding | None]:
    def look(body: dict[str, Any]) -> Finding | None:
        share = next((each["share"] for each in body["phases"] if each["name"] == name), 0.0)
        return _found("warn", f"{percent(share)} of the time is {title}", do) if share >= least else None

    return look


def _saving(body: dict[str, Any]) -> Finding | None:
    if body["failed_saves"]:
        return _found("bad", f"{len(body['failed_saves'])} checkpoints could not be saved", body["failed_saves"][-1])
    share = body["save_totals"]["share"]
    if share < _STALL:
        return None
    stall = duration(body["save_totals"]["stall"])
    return _found("warn", f"Saving held training up for {stall}, {percent(share)} of the time", "Save less often.")


def _changes(body: dict[str, Any]) -> Finding | None:
    names = [each["name"] for each in body["settings"] if each["differs"]]
    if not names:
        return None
    return _found("note", "Attempts differ in their settings or environment", ", ".join(names))


def _found(level: str, title: str, detail: str) -> Finding:
    return {"level": level, "title": title, "detail": detail}


_LOOKS: tuple[Callable[[dict[str, Any]], Finding | None], ...] = (
    _not_finite, _failed, _lost_time, _slow_rank,
    _share("data", _DATA, "waiting for data", "Give the loader more workers, or make samples cheaper."),
    _share("collectives", _WAITING, "waiting for other ranks", "See which rank is slow, or whether the network is."),
    _saving, _changes,
)  # fmt: skip
