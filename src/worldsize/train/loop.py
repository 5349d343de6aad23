"""Room: the training loop: asking for the next step counts the one before, agrees, saves and stops.

None of that belongs to the update: what the program does after `step.update()` is then inside the commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.config import Duration
from worldsize.errors import EXIT_STOPPED, CheckpointError, StepError
from worldsize.runtime import signals
from worldsize.train import state
from worldsize.train.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from worldsize.checkpoint.save import Checkpointer
    from worldsize.data.loader import Loader
    from worldsize.runtime.comm import Pending
    from worldsize.track.base import Tracker
    from worldsize.train.engine import Engine
    from worldsize.train.keep import Kept
    from worldsize.train.ledger import Ledger
    from worldsize.train.progress import Progress
    from worldsize.train.record import Recorder
    from worldsize.train.settings import Settings

_SIGNAL, _STOP, _SAVE, _FLUSH = range(4)


@dataclass(slots=True)
class Loop:
    """One pass of a run over its steps, from where it stands to its end."""

    engine: Engine
    settings: Settings
    loader: Loader
    checkpointer: Checkpointer
    kept: Kept
    at: state.Progress
    total: int
    tracker: Tracker
    screen: Progress
    recorder: Recorder
    announce: Callable[[Path, int], None]
    abandon: Callable[[StepError], None]
    close: Callable[[], None]
    ledger: Ledger | None = None
    why: str | None = None
    committed: int = -1
    saved_at: float = field(default_factory=time.monotonic)
    current: Step | None = None
    wants_save: bool = False
    sums: dict[str, tuple[Any, float]] = field(default_factory=dict)

    def steps(self) -> Iterator[Step]:
        """The run's steps. What a step did is counted when the next one is asked for."""
        source = self.loader.steps(self.at.step + self.at.shift, self.total + self.at.shift)
        if self.at.tail:
            piece = self.loader.plan.step(self.at.step + self.at.shift - 1)
            yield from self._offer(Step.again(self.engine, piece, self.at.shift))
            self.at.tail = False
        self._settle(self._ask().wait())
        batches = next(source, None)
        while batches is not None:
            step = Step(self.engine, batches, self.at.shift)
            self.engine.begin_step(step.index)
            yield from self._offer(step)
            self._count(step, batches.totals["samples"])
            asked = self._ask()
            # The answer travels while the next step's data is fetched.
            batches = next(source, None)
            self._settle(asked.wait(), step)
            if self.why is not None:
                break
        self._finish()

    def interrupted(self) -> None:
        """A stop was agreed inside an evaluation: commit the step that was made, and do what follows it again."""
        if self.current is not None and self.current.updated:
            self._count(self.current, int(self.current.totals["samples"]))
            self.at.tail = True
        self._leave(signals.received() or "stop")

    def _offer(self, step: Step) -> Iterator[Step]:
        self.current = step
        try:
            yield step
        except GeneratorExit:
            self._left(step)
            raise
        if not step.updated:
            raise StepError(
                f"step {step.index} ended without update", do="call step.update() at the end of the loop body"
            )
        self.current = None

    def _count(self, step: Step, samples: float) -> None:
        piece = self.loader.plan.step(step.index + self.at.shift)
        self.at.step, self.at.samples = step.index + 1, self.at.samples + int(samples)
        self.at.epoch = piece.epoch + piece.ends_epoch
        self.wants_save = self._due(step)
        self.recorder.take(step, self.at.samples, self.engine.parts.optimizers)
        for name, (total, count) in step.sums.items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = before[0] + total, before[1] + count
        if self.ledger is not None:
            self.ledger.write(step)

    def _due(self, step: Step) -> bool:
        every = self.settings.saving.every
        if every is None or self.at.best.get("step") == self.at.step:
            return every is not None
        length = Duration.parse(every)
        if length.unit == "ep":
            return step.ends_epoch and (step.epoch + 1) % length.count == 0
        if length.unit == "st":
            return self.at.step % length.count == 0
        before = self.at.samples - int(step.totals["samples"])
        return before // length.count != self.at.samples // length.count

    def _ask(self) -> Pending:
        """What this rank would like: to stop, to end, to save, to write. All get to know what anybody wants."""
        stop = signals.received() is not None or self.at.step == self.settings.stop_after
        minutes = self.settings.saving.every_minutes
        late = minutes is not None and time.monotonic() - self.saved_at > minutes * 60
        wishes = (stop, self.why is not None, self.wants_save or late, self.recorder.due)
        return self.engine.comm.start_max([float(wish) for wish in wishes])

    def _settle(self, wishes: list[float], step: Step | None = None) -> None:
        for outcome in self.checkpointer.poll():
            self._report(outcome)
        if wishes[_FLUSH] or wishes[_SAVE] or wishes[_SIGNAL]:
            self._flush()
        if wishes[_SIGNAL]:
            self._leave(signals.received() or "stop")
        if wishes[_STOP]:
            self.why = self.why or "another rank stopped"
        elif wishes[_SAVE] and step is not None:
            self._commit(wait=self.settings.saving.synchronous)

    def _flush(self) -> None:
        mine = {name: (float(total), float(count)) for name, (total, count) in self.sums.items()}
        everyone = self.engine.comm.gather(mine)
        self.sums.clear()
        self.recorder.flush(everyone)

    def _commit(self, *, wait: bool) -> None:
        if self.committed == self.at.step:
            return
        self.kept.refuse_differences(self.engine.comm)
        facts = {
            "step": self.at.step,
            "epoch": self.at.epoch,
            "samples": self.at.samples,
            "layout": self.engine.strategy.layout(),
            "best": self.at.best.get("step") == self.at.step,
        }
        self.checkpointer.save(
            state.tensors(self.engine, self.kept), state.plain(self.engine, self.kept, self.at), facts, wait=wait
        )
        self.committed, self.saved_at = self.at.step, time.monotonic()
        for outcome in self.checkpointer.poll():
            self._report(outcome)

    def _report(self, outcome: Any) -> None:
        if outcome.error is None:
            self.tracker.event("save", step=outcome.step, seconds=outcome.seconds, bytes=outcome.bytes)
            self.announce(outcome.path, outcome.step)
            return
        self.tracker.event("save failed", step=outcome.step, error=str(outcome.error))
        self.screen.say(f"worldsize: step {outcome.step} was not saved: {outcome.error}")
        if self.settings.saving.on_error == "stop":
            raise CheckpointError(f"step {outcome.step} could not be saved", found=str(outcome.error))

    def _leave(self, reason: str) -> None:
        """Stop on request: one save, the same on all ranks, and the exit code that says 'start me again'."""
        self._flush()
        if self.at.step > 0:
            self._commit(wait=True)
        self._drain()
        self.tracker.event("stop", step=self.at.step, reason=reason)
        self.screen.say(f"worldsize: stopped at step {self.at.step} ({reason}); start again to go on")
        self.close()
        raise SystemExit(EXIT_STOPPED)

    def _finish(self) -> None:
        self._flush()
        self.at.done = self.why
        self._commit(wait=True)
        self._drain()
        self.tracker.event("end", step=self.at.step, reason=self.why or "finished")

    def _drain(self) -> None:
        """The last save must be there: without it neither 'finished' nor 'start again' would be true."""
        for outcome in self.checkpointer.wait():
            self._report(outcome)
            if outcome.error is not None and outcome.step == self.at.step:
                raise CheckpointError(f"the last step, {outcome.step}, could not be saved", found=str(outcome.error))

    def _left(self, step: Step) -> None:
        self.abandon(
            StepError(
                f"loop left at step {step.index}: that step is not committed",
                do="use run.stop(), and let the loop end",
            )
        )
