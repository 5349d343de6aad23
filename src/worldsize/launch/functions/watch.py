"""Room: jobs of functions in a Slurm queue: one thread asks for all of them at once, less and less often."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from worldsize.errors import WorldsizeError
from worldsize.launch.functions.job import End, Job
from worldsize.launch.slurm import states
from worldsize.launch.slurm.states import Asked, Listing
from worldsize.launch.slurm.watch import Pace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from worldsize.launch.slurm.client import Client
    from worldsize.launch.slurm.states import State

R = TypeVar("R")
_FIRST_S, _LAST_S = 0.3, 10.0
"""Seconds between two questions: at first, at last."""
_LATE_S = 30.0
"""How long files of a node may take to be seen here."""
_OWN = frozenset({"COMPLETED", "FAILED"})
"""Ends that are the program's own."""


class SlurmJob(Job[R]):
    """A call that is in the queue, runs or ran."""

    def __init__(self, job_id: str, name: str, folder: Path, client: Client) -> None:
        super().__init__(job_id, name, folder)
        self._client = client
        self.submitted = self.seen = time.time()
        self._over_since: float | None = None

    def _end(self) -> None:
        self._client.cancel([self.job_id])

    def told(self, state: State) -> bool:
        """Take what is known of it now; whether that is the end of it."""
        self.state = states.words(state)
        if state.facts is not None and state.source == "squeue":
            self.seen = time.time()
        if not state.final:
            self._over_since = None
            return False
        end = End(
            state.name == "COMPLETED",
            self.state,
            forced=state.name not in _OWN and state.source != "nobody",
            attempt=state.facts.restarts if state.facts else None,
        )
        if state.source == "nobody":
            end = self._as_left()
        if self._settled(end):
            self._conclude(end)
        return self.done()

    def _as_left(self) -> End:
        """Nobody knows it any more: what its ranks left is all there is."""
        found = self._left(None)
        whole = bool(found) and len(found) == found[0].world and not any(each.raised for each in found)
        return End(whole, self.state)

    def _settled(self, end: End) -> bool:
        """A second look: a job that is put back looks ended for a moment, and files may be late."""
        now = time.monotonic()
        if self._over_since is None:
            self._over_since = now
            return end.ok and bool(self._left(end.attempt))
        late = end.ok and not self._left(end.attempt)
        return not late or now - self._over_since > _LATE_S


class Watcher:
    """Asks for all open jobs of one cluster. Its thread ends with them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._jobs: list[SlurmJob[object]] = []
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pace = Pace(_FIRST_S, _LAST_S)

    def add(self, jobs: Sequence[SlurmJob[R]]) -> None:
        """Watch these too."""
        with self._change:
            self._jobs += jobs  # type: ignore[arg-type] # what they return does not matter here
            self._pace = Pace(_FIRST_S, _LAST_S)
            self._change.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="worldsize-jobs", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._change:
                self._jobs = [job for job in self._jobs if not job.done()]
                if not self._jobs:
                    self._thread = None
                    return
                jobs = list(self._jobs)
            self._ask(jobs)
            with self._change:
                self._change.wait(self._pace.after(news=False))

    def _ask(self, jobs: Sequence[SlurmJob[object]]) -> None:
        try:
            queue = self._client.listing([job.job_id for job in jobs])
            asked = [Asked(job.job_id, time.time(), job.submitted, job.seen) for job in jobs]
            found = [states.merge(queue, None, None, asked=each) for each in asked]
            unlisted = [job.job_id for job, state in zip(jobs, found, strict=True) if state.source == "nobody"]
            kept = self._client.accounting(unlisted) if unlisted else Listing()
            for job, state, each in zip(jobs, found, asked, strict=True):
                whole = states.merge(queue, kept, None, asked=each) if state.source == "nobody" else state
                job.told(whole)
        except WorldsizeError:
            # A command that fails now may answer later: `merge` says when to give a job up.
            return


_watchers: dict[tuple[str | None, str | None], Watcher] = {}
_lock = threading.Lock()


def watch(jobs: Sequence[SlurmJob[R]], client: Client) -> None:
    """Have these jobs watched until their end."""
    with _lock:
        watcher = _watchers.setdefault((client.environ.get("SLURM_CONF"), client.cluster), Watcher(client))
    watcher.add(jobs)
