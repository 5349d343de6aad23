"""Room: the drill: a live job is told to stop, and it is watched whether it saves, waits again and comes back.

What a preemption or a time limit would do to it is found out while somebody looks.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_STOPPED, ConfigError
from worldsize.launch.endings import Ending
from worldsize.launch.slurm import exitfile, logs, states
from worldsize.launch.slurm.acts import STOP

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.launch.slurm.known import Desk, Known

_LOOK_S, _ASK_S = 0.2, 1.0
_SAYS_S = 60.0
"""How long a job that is back may take to say from where it goes on: programs that do not use ours say nothing."""
_RESUMED = re.compile(r"\b(?:resum\w*|going on from)\b[^\n]*?\bstep[ =:]*(\d[\d,]*)", re.IGNORECASE)


@dataclass
class Found:
    """What the drill saw: seconds since the stop signal, None where it did not happen.

    Attributes:
        job: the job; again: its id after it came back.
        saved: when everything was committed, up to `step`.
        queued: when it was back in the queue, under its own id or another.
        running: when it ran again.
        resumed: the step it went on from, where it says so.
        why: why the drill failed, None where all held.
    """

    job: str
    again: str
    saved: float | None = None
    step: int | None = None
    queued: float | None = None
    running: float | None = None
    resumed: int | None = None
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"held": self.why is None}


def drill(desk: Desk, job: str, timeout: float, say: Callable[[str], object]) -> Found:
    """Send the stop signal to a running job and watch it come back.

    Args:
        desk: where it is known.
        job: its id, or that of a member of an array.
        timeout: seconds for all of it.
        say: told each step in a line.

    Raises:
        ConfigError: it is not one running job of ours.
        LaunchError: Slurm refuses it.
    """
    known = _running(desk, job)
    found = Found(known.job, known.job)
    watched = _Drill(desk, known, found, say)
    known.stay(out=False)
    desk.client_of(job).cancel([known.job], signal=STOP, batch=True)
    say(f"{known.job}: told to stop, in attempt {watched.attempt}")
    found.why = watched.run(timeout)
    return found


class _Drill:
    def __init__(self, desk: Desk, known: Known, found: Found, say: Callable[[str], object]) -> None:
        assert known.folder is not None
        assert known.facts is not None
        self._desk, self._found, self._say = desk, found, say
        self._folder, self._now = known.folder, known
        self.attempt = known.facts.restarts or 0
        self._began = time.monotonic()
        self._from = time.time()

    def run(self, timeout: float) -> str | None:
        """Until all has been seen; else what is missing."""
        steps = ((self._saved, "it saved"), (self._queued, "it waited again"), (self._back, "it ran again"))
        for step, what in steps:
            if (why := self._until(step, what, timeout)) is not None:
                return why
            if self._found.saved is None:
                return "it ended and had not saved"
        self._until(self._resumed, "", min(timeout, self._passed() + _SAYS_S))
        if self._found.step == 0:
            return "there was no step to save yet: try again when it trains"
        if None not in {self._found.resumed, self._found.step} and self._found.resumed != self._found.step:
            return f"it went on from step {self._found.resumed}, and had saved step {self._found.step}"
        if self._now.ended and self._now.ending not in {Ending.COMPLETED, Ending.STOPPED}:
            return f"it came back and ended: {self._now.ending}"
        return None

    def _until(self, step: Callable[[], bool], what: str, timeout: float) -> str | None:
        asked = 0.0
        while not step():
            if self._passed() > timeout:
                return f"after {self._passed():.0f} s it had not been seen that {what}: it is {states.words(self._now.state)}"
            if time.monotonic() - asked > _ASK_S:
                asked, self._now = time.monotonic(), self._desk.look([self._found.again])[self._found.again][0]
                if self._now.ended and not self._now.next and not step():
                    return f"it ended before it was seen that {what}: {self._now.ending}"
            time.sleep(_LOOK_S)
        return None

    def _saved(self) -> bool:
        told = exitfile.read(self._folder / f"exit-{self._found.job}-{self.attempt}")
        if told.stopped or told.code == EXIT_STOPPED:
            self._found.saved, self._found.step = self._passed(), told.step
            what = (
                "everything"
                if told.step is None
                else f"step {told.step}"
                if told.step
                else "nothing: it had no step yet"
            )
            self._say(f"{self._found.job}: saved {what} after {self._found.saved:.1f} s")
        return self._found.saved is not None or told.code is not None

    def _queued(self) -> bool:
        now, found = self._now, self._found
        if now.ended and now.next:
            found.again = now.next
        elif not now.waits and not self._is_again(now):
            return False
        found.queued = self._passed()
        where = "back in the queue" if found.again == found.job else f"goes on as job {found.again}"
        self._say(f"{found.job}: {where} after {found.queued:.1f} s")
        return True

    def _back(self) -> bool:
        now, found = self._now, self._found
        done = now.ended and now.ending is Ending.COMPLETED
        if now.job != found.again or not self._is_again(now) or not (done or now.state.name == "RUNNING"):
            return False
        found.running = self._passed()
        self._say(f"{found.again}: runs again after {found.running:.1f} s: {states.words(now.state)}")
        return True

    def _resumed(self) -> bool:
        files = logs.of_job(self._now)
        attempt, text = logs.newest(files[0].path) if files else (None, "")
        said = _RESUMED.findall(text) if attempt == (self._now.facts.restarts or 0 if self._now.facts else 0) else []
        step = int(said[-1].replace(",", "")) if said else self._from_events()
        if step is None:
            return False
        self._found.resumed = step
        self._say(f"{self._found.again}: goes on from step {step}")
        return True

    def _from_events(self) -> int | None:
        """What the run folder says, where the job spec names it."""
        spec = self._now.spec or {}
        if not spec.get("run_dir"):
            return None
        try:
            path = Path(str(spec.get("chdir") or "/"), str(spec["run_dir"]), "events.jsonl")
            events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return None
        steps = [
            event.get("step")
            for event in events
            if event.get("event") == "resume" and event.get("time", 0) > self._from
        ]
        return steps[-1] if steps else None

    def _is_again(self, now: Known) -> bool:
        """Whether this is a later attempt, by its number or its id."""
        restarts = (now.facts.restarts if now.facts else None) or 0
        return now.job != self._found.job or restarts > self.attempt

    def _passed(self) -> float:
        return time.monotonic() - self._began


def _running(desk: Desk, job: str) -> Known:
    members = desk.find([job])
    known = members[0]
    if len(members) > 1:
        raise ConfigError(f"{job} is {len(members)} jobs", found=f"{known.job} and others", do="name one of them")
    if known.folder is None or known.facts is None:
        raise ConfigError(
            f"job {job} was not handed over by worldsize submit", do="drill one that was: worldsize jobs"
        )
    if known.state.name != "RUNNING":
        raise ConfigError(f"job {job} does not run", found=states.words(known.state), do="drill a running job")
    return known
