"""Room: jobs looked at again and again, until they are over: soon after news, seldom while nothing happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldsize.launch.slurm.known import Desk, Known

_LEAST_S, _MOST_S = 1.0, 15.0
_GROWTH = 1.5
_BRIEF = frozenset({"PREEMPTED", "NODE_FAIL"})
"""States that a job which goes back into the queue may pass through: they count when they are seen twice."""


class Pace:
    """How long to wait before the next look: seconds between `least` and `most`, growing while there is no news."""

    def __init__(self, least: float = _LEAST_S, most: float = _MOST_S) -> None:
        self._least, self._most, self._now = least, most, least

    def after(self, *, news: bool) -> float:
        """Seconds to wait after a look that brought news, or none."""
        self._now = self._least if news else min(self._now * _GROWTH, self._most)
        return self._now


class Watch:
    """Jobs until they are over, with those that go on in their place under another id.

    Args:
        desk: where one asks.
        jobs: ids.
    """

    def __init__(self, desk: Desk, jobs: Sequence[str]) -> None:
        self._desk, self._ids = desk, list(dict.fromkeys(jobs))
        self._pace = Pace()
        self._seen: float | None = None
        self._states: dict[str, str] = {}
        self.over = False
        """Whether all are."""
        self.due = 0.0
        """When to look again, on the clock of `time.monotonic`."""
        self.jobs: list[Known] = []
        """As they were last seen."""

    def look(self) -> list[Known]:
        """Look; those whose state has changed since the last time."""
        found = [known for members in self._desk.look(self._ids, seen=self._seen).values() for known in members]
        if any(known.facts is not None and known.facts.source == "squeue" for known in found):
            self._seen = time.time()
        following = [known.next for known in found if known.ended and known.next]
        more = [job for job in following if job not in self._ids]
        self._ids += more
        news = [known for known in found if self._states.get(known.job) != known.state.name]
        brief = any(known.state.name in _BRIEF for known in news)
        self._states = {known.job: known.state.name for known in found}
        self.over = not more and not brief and all(known.state.final for known in found)
        self.jobs = found
        self.due = time.monotonic() + (0.0 if more else self._pace.after(news=bool(news)))
        return news

    @property
    def code(self) -> int:
        """0 where every job has completed, else the exit code of the first that has not; of a chain the last counts."""
        return next((known.code for known in self.jobs if known.code and not (known.ended and known.next)), 0)
