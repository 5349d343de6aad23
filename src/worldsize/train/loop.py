"""Room: the training loop: asking for the next step counts the one before, agrees, saves and stops.

None of that belongs to the update: what the program does after `step.update()` is then inside the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_STOPPED, StepError
from worldsize.runtime import signals
from worldsize.runtime.clock import DATA, SAVE
from worldsize.train import state
from worldsize.train.agree import Agreement, Wishes
from worldsize.train.garbage import Garbage
from worldsize.train.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from worldsize.data.loader import Loader, StepBatches
    from worldsize.track.base import Tracker
    from worldsize.train.commit import Committer
    from worldsize.train.engine import Engine
    from worldsize.train.ledger import Ledger
    from worldsize.train.profile import NoProfile
    from worldsize.train.progress import Progress
    from worldsize.train.record import Recorder
    from worldsize.train.settings import Settings
    from worldsize.train.state import Progress as At
    from worldsize.train.times import Times


@dataclass(slots=True)
class Loop:
    """One pass of a run over its steps, from where it stands to its end."""

    engine: Engine
    settings: Settings
    loader: Loader
    committer: Committer
    at: At
    total: int | None
    tracker: Tracker
    screen: Progress
    recorder: Recorder
    times: Times
    profile: NoProfile
    back: Callable[[], At]
    abandon: Callable[[StepError], None]
    close: Callable[[], None]
    ledger: Ledger | None = None
    garbage: Garbage = field(default_factory=Garbage)
    wish: str | None = None
    why: str | None = None
    """Why the run ends; `wish` is this rank's own."""
    current: Step | None = None
    wants_save: bool = False
    agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.engine.comm, self.engine.clock, self._wishes)

    def steps(self) -> Iterator[Step]:
        """The run's steps. What a step did is counted when the next one is asked for."""
        self.why = self.at.done
        if self.at.done or self._reached:
            self.screen.say(f"worldsize: nothing to do: {self.at.done or 'finished'} at step {self.at.step}")
            if not self.at.tail:
                return
        source = yield from self._begin()
        self.engine.clock.start()
        batches, began = self._next(source), self.at.step
        while batches is not None:
            step = Step(self.engine, batches, self.at.shift)
            self.engine.begin_step(step.index)
            self.profile.begin(step.index)
            yield from self._offer(step)
            if not self.engine.guard.goes_back:
                self._count(step, batches.totals["samples"])
                if step.index == began:
                    self.engine.clock.timed(SAVE, self.committer.prepare)
                    self.garbage.spare()
                self._settle(step)
                batches = self._next(source)
            if self.engine.guard.goes_back or (batches is None and self.engine.guard.drain()):
                self._go_back()
                source = yield from self._begin()
                batches = self._next(source)
        self._end("end", self.why or "finished")

    def interrupted(self) -> None:
        """A stop was agreed inside an evaluation: commit the step that was made, and do what follows it again."""
        step, self.current = self.current, None  # it is left on purpose
        if self.engine.guard.drain():
            self._go_back()
        elif step is not None and step.updated and not step.made:
            self._count(step, step.totals["samples"])
            self.at.tail = step.tail()
        self._settle(leaves=True)

    @property
    def _reached(self) -> bool:
        """Whether the run is as long as it was asked to be."""
        return self.at.tokens >= self.settings.duration.count if self.total is None else self.at.step >= self.total

    def _begin(self) -> Generator[Step, None, Iterator[StepBatches]]:
        """From a commit on: do again what a stop interrupted after its step, and find the batches of the next one."""
        if self.at.tail:
            yield from self._offer(Step.again(self.engine, self.at.step - 1, self.at.tail))
            self.at.tail = None
            self.committer.mark(self.at)
        self._settle()
        stop = None if self.total is None else self.total + self.at.shift
        return self.loader.steps(self.at.step + self.at.shift, stop)

    def _next(self, source: Iterator[StepBatches]) -> StepBatches | None:
        over = self.why is not None or self._reached
        return None if over else self.engine.clock.timed(DATA, lambda: next(source, None))

    def _go_back(self) -> None:
        # What an undone step wished for was said of weights that are gone.
        self.at, self.wish, self.why = self.back(), None, None

    def _offer(self, step: Step) -> Iterator[Step]:
        self.current = step
        try:
            yield step
        except GeneratorExit:
            if self.current is step:
                self._left(step)
            raise
        if not step.updated:
            raise StepError(
                f"step {step.index} ended without update", do="call step.update() at the end of the loop body"
            )
        self.current = None

    def _count(self, step: Step, samples: float) -> None:
        self.at.step, self.at.samples = step.index + 1, self.at.samples + int(samples)
        self.at.epoch = step.epoch + step.ends_epoch
        self.at.tokens += state.tokens(step.totals) if self.total is None else 0
        if step.ends_epoch:
            self.engine.end_epoch()
        self.wants_save = self.committer.due(step, self.at)
        self.recorder.take(step, self.at.samples, self.engine.parts.optimizers)
        self.times.take(step.index, samples)
        self.profile.end(step.index)
        if self.ledger is not None:
            self.ledger.write(step)

    def _wishes(self) -> Wishes:
        """What this rank would like after this step."""
        leave, recorder = signals.received() is not None or self.committer.must_end, self.recorder
        return Wishes(leave, self.wish is not None, self.committer.late, recorder.due(), recorder.holds)

    def _settle(self, step: Step | None = None, *, leaves: bool = False) -> None:
        """Do what ranks wish for; after a step, or None where it has none to commit."""
        self.committer.report()
        while self.engine.notes:
            self.screen.say(f"worldsize: {self.engine.notes.pop(0)}")
        ends = leaves or (step is not None and self.at.step == self.settings.stop_after)
        for wishes in self.agreement.answers(meet=step is None or ends or self.wants_save or self._reached):
            save = step is not None and (self.wants_save or wishes.save)
            self._do(wishes._replace(leave=wishes.leave or ends, save=save))

    def _do(self, wishes: Wishes) -> None:
        if (wishes.save or wishes.leave) and self.engine.guard.drain():
            return  # the loop goes back, and hears again who wishes to leave
        if wishes.write or wishes.save:
            self.recorder.flush(self.engine.comm if wishes.save or wishes.sums else None)
            self.times.flush()
        if wishes.end:
            self.why = next((why for why in self.engine.comm.gather(self.wish) if why is not None), None)
        if wishes.leave:
            self._leave(signals.received() or ("time limit" if self.committer.must_end else "stop"))
        if wishes.save and not wishes.end:
            self.engine.clock.timed(SAVE, lambda: self.committer.commit(self.at, last=False))

    def _leave(self, reason: str) -> None:
        """Stop on request: one save, the same on all ranks, and the exit code that says 'start me again'."""
        self._end("stop", reason)
        self.committer.stopped(self.at.step)
        self.screen.say(f"worldsize: stopped at step {self.at.step} ({reason}); start again to go on")
        self.close()
        raise SystemExit(EXIT_STOPPED)

    def _end(self, event: str, reason: str) -> None:
        self.at.done = self.why
        self.recorder.flush(self.engine.comm)
        self.times.flush(last=True)
        if self.at.step > 0:
            self.engine.clock.timed(SAVE, lambda: self.committer.commit(self.at, last=True))
        self.tracker.event(event, step=self.at.step, reason=reason)

    def _left(self, step: Step) -> None:
        do = "use run.stop(), and let the loop end"
        self.abandon(StepError(f"loop left at step {step.index}: that step is not committed", do=do))
