"""Room: the trackers of a run: the folder's own lines always, and the libraries that were asked for."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from worldsize.track.base import Several, Tracker
from worldsize.track.follow import Follower, Place
from worldsize.track.jsonl import JsonLines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worldsize.train.folder import RunFolder
    from worldsize.train.progress import Progress
    from worldsize.train.settings import Settings


def choose(settings: Settings, folder: RunFolder, attempt: int, screen: Progress) -> Tracker:
    """For the one process that writes. The lines come first: the others read them."""
    lines = JsonLines(settings.dir, attempt, screen.say)
    if not settings.track:
        return lines
    run, lock = folder.read(), Lock()

    def place(name: str) -> Place:
        def keep(ids: Mapping[str, str]) -> None:
            with lock:
                folder.add("trackers", {name: dict(ids)})

        ids = run.get("trackers", {}).get(name, {})
        return Place(settings.dir, run["id"], attempt, ids, keep, screen.say)

    return Several([lines, *(Follower(track, place(track.name)) for track in settings.track)])
