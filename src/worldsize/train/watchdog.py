"""Room: the watchdog: a thread in every rank that notices when no step is made any more.

The loop only writes two numbers that this thread looks at now and then. Who holds the others up is found out in `stall`,
through files in the run folder, which needs no collective: who is stopped or holds its interpreter cannot write, and that is
the evidence. Whoever shares a host with such a rank asks the kernel, and the rank's own C code, about it. Where a rank is to be
ended, a process beside it does so that hears nothing from this thread.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from worldsize.runtime import clock, env, stacks, waiting
from worldsize.runtime.beside import Beside
from worldsize.train.stall import Known, Place, Scene, Stalled
from worldsize.train.suspect import Member

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.train.engine import Engine
    from worldsize.train.settings import Stall

FOLDER = "stall"
_LEARNING = 3
"""Steps of an attempt that may take as long as `Stall.first`: they compile, allocate, open files."""
_USUAL = 9
"""Over how many looks at the steps their usual time is taken."""
_SLOWEST_TICK_S, _FASTEST_TICK_S = 5.0, 0.1
_NEWS_S = 60.0
"""How late NFS may show a file of another host, as it is mounted by default."""


class Watchdog:
    """Watches one run. Made by all ranks together.

    Args:
        rules: how long what may take, and what is done about it.
        engine: its pulse and its clock are looked at.
        folder: of this attempt, in the run folder.
        say: takes a line for a person.
    """

    def __init__(self, rules: Stall, engine: Engine, folder: Path, say: Callable[[str], None]) -> None:
        self._rules, self._pulse, self._clock = rules, engine.pulse, engine.clock
        self._run_is = weakref.ref(engine)
        address, comm = stacks.here(), engine.comm
        me = Known(
            Member(comm.rank, address.host[0], address.pid), address, env.read().get("TORCHELASTIC_ERROR_FILE")
        )
        everyone = comm.gather(me)
        self._allowances = {clock.DATA: rules.data, clock.EVALUATION: rules.evaluation, clock.SAVE: rules.save}
        shortest = min(rules.floor, rules.first, *self._allowances.values())
        self._tick = min(_SLOWEST_TICK_S, max(_FASTEST_TICK_S, shortest / 8))
        self._scene = Scene(
            everyone, everyone[comm.rank], (waiting.main(), threading.get_native_id()), getattr(comm, "board", None),
            engine.device.type == "cuda", folder / FOLDER, self._tick, _settled(everyone, self._tick, rules.floor),
            rules.policy == "requeue", say,
        )  # fmt: skip
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worldsize-watchdog", daemon=True)
        self._beside: Beside | None = None
        self._stall: Stalled | None = None
        self._usual: deque[float] = deque(maxlen=_USUAL)
        now = time.monotonic()
        self._began, self._looked = self._pulse.step, now
        self._seen = (self._pulse.step, self._pulse.beat, self._clock.phase)
        self._since, self._step_since = now, now

    def start(self) -> None:
        """Begin to watch."""
        if self._scene.requeue:
            me, folder = self._scene.me, str(self._scene.folder)
            self._beside = Beside(self._tick, me.member.rank, me.address.file, folder)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()
        # What was left of the training may take less time than passes between two looks.
        if self._stall is not None and self._pulse.step != self._seen[0]:
            self._stall.over(time.monotonic())

    def _run(self) -> None:
        with contextlib.nullcontext() if self._beside is None else contextlib.closing(self._beside):
            while not self._over.wait(self._tick):
                if self._run_is() is None or getattr(sys, "last_value", None) is not None:
                    return  # nobody holds the run any more; or the program failed, and a person looks at what is left
                self._well()
                with contextlib.suppress(OSError):  # a full disk is the training's to tell
                    self._look(time.monotonic())

    def _well(self) -> None:
        """Where native code holds the interpreters of all ranks, or of the only one, no thread can say this."""
        if self._beside is not None:
            looks = (2 * max(self._allowance(), self._rules.floor) + self._scene.settled) / self._tick
            words = self._scene.me.member.words
            self._beside.heard(math.ceil(looks), f"{words} has made no progress since step {self._pulse.step}")

    def _look(self, now: float) -> None:
        slept, self._looked = now - self._looked > 3 * self._tick + 1, now
        seen = (self._pulse.step, self._pulse.beat, self._clock.phase)
        if seen != self._seen or slept:  # who was stopped himself knows nothing
            self._moved(seen, now)
        stuck, overdue = now - self._since, now - self._since > self._allowance()
        late = now - self._step_since > min(self._rules.floor, self._allowance())
        if overdue or (late and any(self._scene.folder.glob("rank-*.json"))):
            self._stall = self._stall or Stalled(self._scene, now)
            self._stall.go_on(now, Place(seen[0], seen[2], stuck, overdue))

    def _moved(self, seen: tuple[int, int, int], now: float) -> None:
        if seen[0] != self._seen[0]:
            if seen[0] - self._began > _LEARNING:
                self._usual.append((now - self._step_since) / (seen[0] - self._seen[0]))
            self._step_since = now
        if self._stall is not None:
            self._stall.over(now)
            self._stall = None
        self._seen, self._since = seen, now

    def _allowance(self) -> float:
        """Seconds for which what is done now may last."""
        step, _, phase = self._seen
        least = self._rules.first if step - self._began <= _LEARNING or not self._usual else 0.0
        if least or phase in self._allowances:
            return max(self._allowances.get(phase, 0.0), least)
        return max(self._rules.floor, self._rules.times * statistics.median(self._usual))


def _settled(everyone: list[Known], tick: float, floor: float) -> float:
    """Seconds within which every rank that can speak is heard by the others: file systems show news of other hosts late."""
    here = max(3 * tick, 1.0)
    return here if len({each.address.host for each in everyone}) == 1 else max(here, min(floor, _NEWS_S))
