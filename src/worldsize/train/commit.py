"""Room: when the run's state is committed, and what is said about how that went."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldsize.config import Duration
from worldsize.errors import CheckpointError
from worldsize.runtime import signals
from worldsize.runtime.comm import decide
from worldsize.train import state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.checkpoint.save import Checkpointer, Outcome
    from worldsize.data.loader import Loader
    from worldsize.track.base import Tracker
    from worldsize.train.engine import Engine
    from worldsize.train.keep import Kept
    from worldsize.train.progress import Progress
    from worldsize.train.settings import Saving
    from worldsize.train.step import Step

_SAFETY, _SPARE_S = 2.0, 10.0
"""How much longer than the slowest save so far the last one may take."""


@dataclass(slots=True)
class Committer:
    """Commits one run.

    Attributes:
        announce: tells the launcher about a committed checkpoint.
        stopped: tells the batch script that the training stopped on request at a step.
        resumed_at: the step of the checkpoint that this attempt began from, or -1.
    """

    engine: Engine
    kept: Kept
    saving: Saving
    loader: Loader
    checkpointer: Checkpointer
    tracker: Tracker
    screen: Progress
    announce: Callable[[Path, int], None]
    stopped: Callable[[int], None]
    resumed_at: int
    exact: bool | str = True
    since: float = field(default_factory=time.monotonic)
    ends: float | None = field(default_factory=signals.end_time)
    """When the scheduler ends this job by force, seconds since 1970."""
    counted: float = field(default_factory=time.monotonic)
    taken: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    """Seconds that the last steps took; some hold an evaluation."""
    stalls: dict[int, float] = field(default_factory=dict)
    """Seconds that training stood still, by the step of saves that are under way."""

    @property
    def late(self) -> bool:
        """Whether so much time has passed that this rank wishes for a commit."""
        minutes = self.saving.every_minutes
        return minutes is not None and time.monotonic() - self.since > minutes * 60

    @property
    def must_end(self) -> bool:
        """Whether a save that is begun later may not be whole before the scheduler ends the job.

        A stop signal mostly comes before; this is for saves that take longer than it leaves (`signal_lead`). Two more steps
        may be made before this is looked at again and all ranks know.
        """
        if self.ends is None or not self.checkpointer.slowest:
            return False
        steps = 2 * min(self.taken, default=0.0)
        return time.time() + steps + _SAFETY * self.checkpointer.slowest + _SPARE_S > self.ends

    def due(self, step: Step, at: state.Progress) -> bool:
        """Whether a commit follows this step, as the settings say: the same answer on every rank. Asked once a step."""
        before, self.counted = self.counted, time.monotonic()
        self.taken.append(self.counted - before)
        if self.saving.every is None:
            return False
        if at.best.get("step") == at.step:
            return True
        length = Duration.parse(self.saving.every)
        if length.unit == "ep":
            return step.ends_epoch and (step.epoch + 1) % length.count == 0
        if length.unit == "st":
            return at.step % length.count == 0
        before = at.samples - int(step.totals["samples"])
        return before // length.count != at.samples // length.count

    def commit(self, at: state.Progress, *, last: bool) -> None:
        """Begin to save this state, or see that it is saved already. Collective.

        Args:
            at: where the training stands.
            last: nothing follows it: return only when it is committed.

        Raises:
            CheckpointError: the last one could not be saved; or errors of saves end the run.
            StepError: kept state differs between ranks.
        """
        wait, began = last or self.saving.synchronous, time.monotonic()
        if self.resumed_at != at.step:
            self.kept.refuse_differences(self.engine.comm)
            self.engine.refuse_differences()
            # The checkpointer itself knows what is committed already, and tries again what failed.
            tensors, plain = state.tensors(self.engine, self.kept), state.plain(self.engine, self.kept, at)
            plain["data"] = self.loader.state_dict()
            later = () if wait else state.optimizers(self.engine, tensors)
            self.checkpointer.save(tensors, plain, self._facts(at), later=later, wait=wait)
            self.since = time.monotonic()
        outcomes = self.checkpointer.wait() if wait else self.checkpointer.poll()
        self.stalls[at.step] = time.monotonic() - began
        self._report(outcomes)
        # Without the last commit neither "finished" nor "start again" is true.
        lost = [outcome for outcome in outcomes if last and outcome.error is not None and outcome.step == at.step]
        if lost:
            raise CheckpointError(f"the last step, {at.step}, could not be saved", found=str(lost[0].error))

    def mark(self, at: state.Progress) -> None:
        """After a step that is committed already: where what followed it made it the best, keep its checkpoint. Collective."""
        if at.best.get("step") == at.step:
            decide(self.engine.comm, lambda: self.checkpointer.mark_best(at.step))

    def prepare(self) -> None:
        """After the first step, when all tensors exist: plan the saves and say where the disk is too small. Collective."""
        soon = self.saving.every is not None or self.saving.every_minutes is not None
        estimate = self.checkpointer.prepare(state.tensors(self.engine, self.kept), memory=soon)
        if not estimate.fits:
            self.screen.say(
                f"worldsize: a checkpoint takes {estimate.bytes / 1e9:,.1f} GB, free are {(estimate.free or 0) / 1e9:,.1f} GB"
            )

    def wait(self) -> None:
        """Until the save under way has ended. Collective."""
        self._report(self.checkpointer.wait())

    def report(self) -> None:
        """Say how saves went that ended meanwhile."""
        self._report(self.checkpointer.poll())

    def _report(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            stall = self.stalls.pop(outcome.step, outcome.stall)
            if outcome.error is None:
                facts = {"seconds": outcome.seconds, "stall": stall, "bytes": outcome.bytes}
                self.tracker.event("save", step=outcome.step, **facts)
                self.announce(outcome.path, outcome.step)
                size = f"{outcome.bytes / 1e6:,.1f} MB in {outcome.seconds:.1f} s"
                self.screen.committed(f"worldsize: committed {outcome.path.name} ({size})")
                continue
            self.tracker.event("save failed", step=outcome.step, error=str(outcome.error))
            self.screen.say(f"worldsize: step {outcome.step} was not saved: {outcome.error}")

    def _facts(self, at: state.Progress) -> dict[str, object]:
        return {
            "step": at.step,
            "epoch": at.epoch,
            "samples": at.samples,
            "layout": self.engine.strategy.layout(),
            "exact": self.exact,
            "best": at.best.get("step") == at.step,
        }
