"""Room: the way into a run: folder, owner, what was begun before, the newest checkpoint, the data, the displays.

Everything that can be wrong is found here, before the first forward pass, and said with both values.
"""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from worldsize.checkpoint import disk, load, owner, weights
from worldsize.checkpoint.retain import Keep
from worldsize.checkpoint.save import Checkpointer
from worldsize.data.batch import BatchPlan, deal, total_steps
from worldsize.data.loader import Loader
from worldsize.data.sources import adopt
from worldsize.errors import CheckpointError, DataError, LayoutError, StepError
from worldsize.runtime import exits, report, stacks
from worldsize.runtime.comm import decide, on_one
from worldsize.runtime.mark import NAME, Mark
from worldsize.track.base import Nothing, Tracker
from worldsize.track.jsonl import JsonLines
from worldsize.train import facts, progress, record, state, trackers, warm
from worldsize.train.commit import Committer
from worldsize.train.folder import RunFolder
from worldsize.train.ledger import Ledger
from worldsize.train.loop import Loop
from worldsize.train.profile import FOLDER as PROFILES
from worldsize.train.profile import NoProfile, Profile
from worldsize.train.times import Lines, Times
from worldsize.train.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.data.making import Count
    from worldsize.data.sources import Source
    from worldsize.train.engine import Engine
    from worldsize.train.keep import Kept
    from worldsize.train.settings import Settings


def claim(engine: Engine, settings: Settings) -> owner.Owner:
    """Become the folder's one writer. Every rank gets to know who owns it, or why not. Collective."""

    def first() -> owner.Owner:
        disk.check_writable(settings.dir)
        found = owner.claim(settings.dir, run_id=settings.dir.name, job=engine.session.world.run_id)
        report.began(settings.dir)
        return found

    owned = decide(engine.comm, first)
    here = engine.comm.gather((socket.gethostname(), owner.seen(owned)))
    blind = sorted({host for host, sees in here if not sees})
    if blind:
        raise CheckpointError(
            "the run folder is not shared by all nodes",
            found=f"{owned.run_dir} of {here[0][0]} is not that of {', '.join(blind)}",
            do="choose a folder on a file system that every node mounts, by its absolute path",
        )
    return owned


def failed(owned: owner.Owner, facts: dict[str, object]) -> None:
    """Write down what ended this rank."""
    with closing(JsonLines(owned.run_dir, owned.attempt)) as lines:
        lines.event("failure", **facts)


def plan(engine: Engine, settings: Settings, data: Any) -> tuple[Settings, Source, BatchPlan]:
    """Take the data over, settle the micro-batch and cut the training into steps.

    Raises:
        ConfigError: nothing says what a micro-batch is.
        LayoutError: there are more ranks than micro-batches in a step.
    """
    source = adopt(data, settings.seed)
    settled = settings.with_micro_batch(source.micro_batch)
    assert settled.micro_batch is not None
    found = BatchPlan(source.length, settled.global_batch, settled.micro_batch, drop_last=source.drop_last)
    micro, ranks = -(-settled.global_batch // settled.micro_batch), engine.strategy.ranks
    if ranks > micro:
        raise LayoutError(
            "there are more ranks than micro-batches in a step: some would never work",
            found=f"{ranks} ranks, global_batch {settled.global_batch} = {micro} micro-batches of {settled.micro_batch}",
            do=f"use at most {micro} ranks, or begin a run with a smaller micro_batch",
        )
    return settled, source, found


def begin(
    engine: Engine,
    settings: Settings,
    kept: Kept,
    owned: owner.Owner,
    source: Source,
    *,
    count: Count | None,
    total: int | None,
    cut: BatchPlan,
    abandon: Callable[[StepError], None],
    close: Callable[[], None],
) -> Loop:
    """Everything between the first question for a step and that step.

    Raises:
        LayoutError: the run was begun as another training.
        CheckpointError: the checkpoint does not fit what was built.
    """
    comm = engine.comm
    if settings.stall.policy != "off":
        stacks.install()  # before data workers are forked, which inherit it
    engine.check_parts(*shares(cut, engine.strategy.ranks, total))
    loader = Loader(
        source,
        cut,
        seed=settings.seed,
        rank=engine.strategy.rank,
        ranks=engine.strategy.ranks,
        padding=engine.padding,
        comm=comm,
        device=engine.device,
        count=count,
        dtype_of_floats=engine.precision.inputs,
        accept=settings.accept,
        counts=engine.strategy.grid.speaks,
    )
    folder = RunFolder(settings.dir)
    order = {"shuffle": source.shuffle, "drop_last": source.drop_last, "drawn": source.sampler is not None}
    notes = decide(comm, lambda: folder.begin(settings, order))
    changes = notes + folder.same_data(comm, settings, loader.fingerprint())
    at, renewed, more = resume(engine, settings, kept, loader)
    changes += renewed
    at.shift = position(cut, at) - at.step

    def back() -> state.Progress:
        committer.wait()
        now, *_ = resume(engine, settings, kept, loader)
        if now.step == 0:
            raise StepError("there is no commit to go back to", do="save more often, or use nonfinite='skip'")
        now.shift = position(cut, now) - now.step
        engine.guard.back(now.step)
        return now

    _watch(engine, settings, owned, at.step)
    if total is not None and settings.duration.unit != "st":
        total -= at.shift  # what the duration counts was planned with other steps before the shift
    screen = on_one(comm, lambda: progress.choose(at.step, total), progress.Silent())
    tracker: Tracker = on_one(comm, lambda: trackers.choose(settings, folder, owned.attempt, screen), Nothing())
    recorder = on_one(comm, lambda: record.StepRecorder(tracker, screen), record.SumRecorder())
    keep = Keep(last=settings.saving.keep_last, every=settings.saving.keep_every, best=settings.saving.keep_best)
    checkpointer = Checkpointer(
        settings.dir,
        comm,
        owner=on_one(comm, lambda: owned, None),
        keep=keep,
        on_error=settings.saving.on_error,
        scattered=engine.parts.scattered,
    )
    engine.hold = checkpointer.hold
    for note in [*changes, *more, *([cut.short] if cut.short else [])]:
        screen.say(f"worldsize: {note}")
    for change in changes:
        tracker.event("change", what=change)
    known = facts.attempt(engine, settings, owned, cut, total)
    kind, layout = "start" if at.step == 0 else "resume", engine.strategy.layout()
    decide(comm, lambda: tracker.event(kind, step=at.step, layout=layout, command=sys.argv, **known))
    committer = Committer(
        engine, kept, settings.saving, loader, checkpointer, tracker, screen,
        announce=on_one(comm, lambda: report.committed, _nobody),
        stopped=on_one(comm, lambda: exits.stopped, _nobody),
        resumed_at=-1 if at.tail else at.step or -1,
        exact="own-generator" if "own-generator" in settings.accept else True,
    )  # fmt: skip
    return Loop(
        engine, settings, loader, committer, at, total, tracker, screen, recorder,
        times=_times(engine, owned, screen.say), profile=_profile(engine, settings, owned, screen.say), back=back,
        abandon=abandon, close=close, ledger=_ledger(engine, settings, owned.attempt),
    )  # fmt: skip


def begun(engine: Engine, settings: Settings) -> dict[str, Any]:
    """What run.json says, on every rank; empty in a new run. Collective."""
    return decide(engine.comm, RunFolder(settings.dir).read)


def settle(engine: Engine, settings: Settings, values: dict[str, Any]) -> None:
    """Put what the program settled into run.json. Collective."""
    if values:
        decide(engine.comm, lambda: RunFolder(settings.dir).add("settled", values))


def _watch(engine: Engine, settings: Settings, owned: owner.Owner, step: int) -> None:
    """From now on, until the run is closed."""
    if settings.stall.policy != "off":
        engine.pulse.step = step - 1
        engine.watchdog = watchdog = Watchdog(settings.stall, engine, owned.folder, progress.Lines(0, None).say)
        watchdog.start()


def _profile(engine: Engine, settings: Settings, owned: owner.Owner, say: Callable[[str], None]) -> NoProfile:
    if settings.profile is None:
        return NoProfile()
    folder = owned.run_dir / PROFILES / f"attempt-{owned.attempt}"
    return Profile(settings.profile, folder, engine.comm, engine.device, say)


def _times(engine: Engine, owned: owner.Owner, say: Callable[[str], None]) -> Times:
    write = on_one(engine.comm, lambda: Lines(owned.run_dir, owned.attempt, say), _nobody)
    mark = on_one(engine.comm, lambda: Mark(owned.folder / NAME, say), _nobody)
    return Times(engine.comm, engine.clock, engine.device, write, mark)


def _ledger(engine: Engine, settings: Settings, attempt: int) -> Ledger | None:
    """Of ranks that are given the same samples, one writes them down."""
    if settings.ledger is None or not engine.strategy.grid.speaks:
        return None
    return Ledger(settings.ledger, engine.comm.rank, attempt)


def shares(cut: BatchPlan, ranks: int, total: int | None) -> tuple[int, int]:
    """The most and the fewest micro-batches that a rank has in any step of the run; none, where that is not known.

    Args:
        cut: how the training is cut into steps.
        ranks: over how many they are dealt.
        total: how many steps are made, where that is known.
    """
    steps = [cut.step(0)]
    if cut.length is not None and (total is None or total >= cut.steps_per_epoch):
        steps.append(cut.step(cut.steps_per_epoch - 1))
    dealt = [stop - start for step in steps for start, stop in deal(len(cut.micro(step)), ranks)]
    ragged = cut.length is None and not cut.drop_last and ranks > 1
    return max(dealt), 0 if ragged else min(dealt)


def resume(
    engine: Engine, settings: Settings, kept: Kept, loader: Loader
) -> tuple[state.Progress, list[str], list[str]]:
    """Read the newest checkpoint that is whole into models, optimizers and everything else. Collective.

    Returns:
        where it stands, a line for each accepted change, and what else is to be said.
    """
    path, notes = load.newest(settings.dir, engine.comm)
    if path is None:
        return state.Progress(), [], [*notes, *imported(engine, settings)]
    train, changes = state.accepted(engine, load.read_train(path), settings.accept)
    wanted = state.wanted(engine, kept, train)
    load.load(path, wanted, engine.comm, scattered=engine.parts.scattered, left=state.left(train))
    at = state.restore(engine, kept, train, wanted)
    loader.load_state_dict(train["data"])
    notes.append(f"going on from {path.name}: step {at.step}, epoch {at.epoch}, {at.samples:,} samples seen")
    return at, changes, notes


def imported(engine: Engine, settings: Settings) -> list[str]:
    """Begin with the weights that `worldsize checkpoint import --to RUN` brought, where it did."""
    source = weights.initial(settings.dir)
    if source is None:
        return []
    (placed, *others) = engine.parts.models.values()
    if others:
        raise LayoutError("imported weights are for a run of one model", found=str(list(engine.parts.models)))
    warm.start(placed, source, engine.comm)
    return [f"beginning with the weights of {source}"]


def position(cut: BatchPlan, at: state.Progress) -> int:
    """Which step of the plan comes next: the one before which as many samples were seen as before this start.

    Raises:
        LayoutError: the samples seen do not fill whole steps of this plan.
    """
    low, high = 0, at.samples + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if cut.samples_before(middle) < at.samples else (low, middle)
    if cut.samples_before(low) != at.samples:
        raise LayoutError(
            "the checkpoint lies inside a step of this batch size",
            found=f"{at.samples:,} samples seen, steps of {cut.global_batch} end at {cut.samples_before(low - 1):,} "
            f"and {cut.samples_before(low):,}",
            do="choose a global_batch whose steps end there, or go on from a checkpoint at the end of an epoch",
        )
    return low


def _nobody(*_: object) -> None:
    """Another process announces."""


def steps_in(settings: Settings, cut: BatchPlan) -> int:
    """How many steps the run has. Raises DataError where that cannot be known, as with tokens."""
    found = total_steps(settings.duration, cut)
    if found == 0:
        raise DataError("the run has no steps", found=f"duration {settings.duration}", do="give at least one step")
    return found


def generated(settings: Settings) -> Any:
    """The data of a loop that makes its own: sample ids, as many as one step has."""
    return torch.utils.data.TensorDataset(torch.arange(settings.global_batch))


def schedules(engine: Engine) -> None:
    """Make the schedules that waited for the number of steps."""
    for scheduled in engine.parts.schedules:
        if scheduled.schedule is None:
            scheduled.schedule = scheduled.make(scheduled.optimizer)
