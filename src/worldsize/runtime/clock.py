"""Room: where this rank's time goes. A clock is told what is done next, and adds up; it never waits for a device.

On the CPU it is the host's clock. On a GPU the host runs ahead, so events are put into the stream instead, and read once
the device has passed them: a phase's time is then what the device spent or stood idle in it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

T = TypeVar("T")
PHASES = ("data", "compute", "collectives", "optimizer", "save", "evaluation", "other")
"""Data wait, forward and backward, waiting for other ranks, optimizer, save stall, evaluation, the rest."""
DATA, COMPUTE, COLLECTIVES, OPTIMIZER, SAVE, EVALUATION, OTHER = range(len(PHASES))

_END = -1
_TIMED = 20.0
"""How many steps of a second are looked at closely, where that costs: 30 µs for a dozen events, as much for a hook."""


@dataclass(slots=True)
class Spent:
    """What a clock read, since it was read the last time.

    Attributes:
        phases: seconds by phase, in the order of `PHASES`.
        steps: seconds of each step, without saves and evaluations.
        own: the same without waiting for other ranks: who is slow, is slow here.
        count: how many steps these stand for: on a GPU not each is timed.
    """

    phases: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    steps: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, phases: list[float], weight: int) -> None:
        """A step with these seconds by phase, which stands for so many."""
        self.phases = [before + seconds * weight for before, seconds in zip(self.phases, phases, strict=True)]
        whole = sum(phases) - phases[SAVE] - phases[EVALUATION]
        self.steps.append(whole)
        self.own.append(whole - phases[COLLECTIVES])
        self.count += weight


class Clock:
    """The host's clock.

    Attributes:
        phase: what is done now; another thread may look.
    """

    def __init__(self) -> None:
        self.phase = OTHER
        self._since = self._began = time.perf_counter()
        self._now = [0.0] * len(PHASES)
        self._steps: list[float] = []
        self._own: list[float] = []
        self._beside = self._waited = 0.0
        self._sending = False
        self._tails: list[float] = []
        self._missed: list[int] = []
        self._unseen, self._tail = 0, 0.0
        self._look = 0.0

    def enter(self, phase: int) -> int:
        """What follows belongs to `phase`. Returns what went before, to be entered again."""
        now = time.perf_counter()
        before = self.phase
        self._now[before] += now - self._since
        self._since, self.phase = now, phase
        return before

    def timed(self, phase: int, act: Callable[[], T]) -> T:
        """Do something that belongs to `phase`."""
        before = self.enter(phase)
        found = act()
        self.enter(before)
        return found

    def backward(self, losses: torch.Tensor) -> None:
        """These losses are sent backward next: what follows the last gradient is waiting for other ranks.

        Of more than `_TIMED` a second some are looked at, and the others taken to be like these.
        """
        if self._since < self._look:
            self._unseen += 1
        elif losses.grad_fn is not None:
            self._look = self._since + 1 / _TIMED
            self._hang(losses)

    def sent(self) -> None:
        """They were; a pipeline only noted them, and what it does with them later is told by nobody."""
        if self.enter(COMPUTE) == COLLECTIVES:
            self._tails.append(self._since - self._tail)
        self._sending = False

    def step(self) -> None:
        """A step is over."""
        self.enter(self.phase)
        now = self._now
        beside, waited = now[SAVE] + now[EVALUATION], now[COLLECTIVES]
        whole = self._since - self._began - beside + self._beside
        self._steps.append(whole)
        self._own.append(whole - waited + self._waited)
        self._missed.append(self._unseen)
        self._unseen = 0
        self._began, self._beside, self._waited = self._since, beside, waited

    def start(self) -> None:
        """The first step begins now: what went before belongs to none."""
        self.enter(OTHER)
        self._began = self._since
        self.read()

    def read(self) -> Spent:
        """Since the last time."""
        found = Spent(self._now, self._steps, self._own, len(self._steps))
        self._now, self._steps, self._own = [0.0] * len(PHASES), [], []
        # Of the step that is under way: what was taken off already is not in the new numbers.
        self._beside -= found.phases[SAVE] + found.phases[EVALUATION]
        self._waited -= found.phases[COLLECTIVES]
        self._complete(found)
        return found

    def _complete(self, found: Spent) -> None:
        """Of the passes that were not looked at the waiting is part of computing still."""
        missed, self._missed, tails, self._tails = self._missed, [], self._tails, []
        if not tails or not any(missed):
            return
        tail = sum(tails) / len(tails)
        found.own = [max(0.0, own - tail * count) for own, count in zip(found.own, missed, strict=True)]
        more = min(tail * sum(missed), found.phases[COMPUTE])
        found.phases[COMPUTE] -= more
        found.phases[COLLECTIVES] += more

    def _hang(self, losses: torch.Tensor) -> None:
        self._sending = True
        losses.register_hook(self._hook)

    def _hook(self, _gradient: torch.Tensor) -> None:
        from torch.autograd import Variable

        # Run in the order in which they are queued: wrappers that wait for their exchange queue theirs later.
        Variable._execution_engine.queue_callback(self._await)  # noqa: SLF001 - as FSDP does it

    def _await(self) -> None:
        if self._sending:
            self.enter(COLLECTIVES)
            self._tail = self._since


class DeviceClock(Clock):
    """The clock of a CUDA device: events in its stream.

    Args:
        event: makes an event with `record`, `query` and `elapsed_time` (milliseconds).
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._event = event or _cuda_event
        self._free: list[Any] = []
        self._marks: deque[tuple[Any, int]] = deque()
        self._every, self._count, self._looked = 1, 0, time.perf_counter()
        self._weights: deque[int] = deque()
        self._weight = 0
        self._timed = False

    def enter(self, phase: int) -> int:
        """See `Clock.enter`."""
        before, self.phase = self.phase, phase
        if self._timed:
            self._mark(phase)
        return before

    def backward(self, losses: torch.Tensor) -> None:
        """See `Clock.backward`."""
        if self._timed and losses.grad_fn is not None:
            self._hang(losses)

    def sent(self) -> None:
        """See `Clock.sent`."""
        self._sending = False
        self.enter(COMPUTE)

    def step(self) -> None:
        """A step is over; of fast ones only some are timed."""
        self._count += 1
        self._weight += 1
        if self._timed:
            self._mark(_END)
            self._weights.append(self._weight)
            self._weight = 0
        self._timed = self._count % self._every == 0
        if self._timed:
            self._mark(self.phase)

    def start(self) -> None:
        """The first step begins now."""
        self._marks.clear()
        self._weights.clear()
        self._timed, self._weight = True, 0
        self._mark(self.phase)

    def read(self) -> Spent:
        """Of the steps that the device has finished."""
        found, now = Spent(), [0.0] * len(PHASES)
        last: tuple[Any, int] | None = None
        for _ in range(self._finished()):
            event, phase = self._marks.popleft()
            if last is not None:
                now[last[1]] += last[0].elapsed_time(event) / 1e3
                self._free.append(last[0])
            last = (event, phase)
            if phase == _END:
                found.add(now, self._weights.popleft())
                self._free.append(event)
                now, last = [0.0] * len(PHASES), None
        self._rate()
        return found

    def _finished(self) -> int:
        """How many marks, up to the end of a step, the device has passed."""
        whole = 0
        for number, (event, phase) in enumerate(self._marks, 1):
            if not event.query():
                break
            whole = number if phase == _END else whole
        return whole

    def _rate(self) -> None:
        """How many steps are timed from now on."""
        now = time.perf_counter()
        self._every = max(1, round(self._count / max(now - self._looked, 1e-3) / _TIMED))
        self._count, self._looked = 0, now

    def _mark(self, phase: int) -> None:
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._marks.append((event, phase))


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)
