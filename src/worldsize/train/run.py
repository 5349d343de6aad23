"""Room: `Run`, the front of a training: what the user calls, in the user's words. The work is done by the rooms beside it."""

from __future__ import annotations

import atexit
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from worldsize.config import Duration, Window
from worldsize.errors import EXIT_STOPPED, ConfigError, StepError
from worldsize.runtime import env, failure, session
from worldsize.runtime.comm import on_one
from worldsize.runtime.grid import Sizes
from worldsize.track.spec import parse
from worldsize.train import memory, progress, start, warm
from worldsize.train.average import Average
from worldsize.train.engine import Engine
from worldsize.train.evaluate import Evaluator, Stopped
from worldsize.train.keep import Kept
from worldsize.train.optim import NamedOptimizer
from worldsize.train.parts import Scheduled, Trained
from worldsize.train.rehearse import rehearse
from worldsize.train.settings import Saving, Settings, Stall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from worldsize.data.batch import BatchPlan
    from worldsize.data.making import Count
    from worldsize.data.sources import Source
    from worldsize.errors import WorldsizeError
    from worldsize.runtime.comm import Comm
    from worldsize.track.spec import Track
    from worldsize.train.loop import Loop
    from worldsize.train.step import Step, Turn

M = TypeVar("M", bound="nn.Module")
O = TypeVar("O", bound="Optimizer")  # noqa: E741 - an optimizer


class Run:
    """One training with its folder, across attempts. Started again, it goes on with exactly the next sample.

    Args:
        dir: the run folder; made where it does not exist.
        global_batch: samples of an optimizer step, over all ranks.
        micro_batch: samples of a forward pass on one rank. Belongs to the training: runs that are compared or resumed
            share it, and how many micro-batches a rank accumulates follows from the number of ranks. A DataLoader's
            batch_size says it too.
        micro_per_step: instead of micro_batch: into how many micro-batches a step is cut.
        duration: "10ep", "500st", "1Msa".
        seed: all random numbers and the order of the data follow from it.
        strategy: single, ddp, fsdp, hsdp, deepspeed, horovod, or one of another package; where None, single for one
            share of the batch and ddp for several.
        tp: over how many ranks each layer is split (tensor parallel). See `worldsize.runtime.grid`.
        pp: in how many stages the model lies (pipeline parallel).
        cp: over how many ranks each sequence is split (context parallel).
        replicas: under hsdp, how many copies of the shards there are; one a host where None.
        precision: fp32, fp64, bf16 (autocast) or fp16 (autocast and a loss scale).
        accept: names of changes against the run's first attempt that are wanted, such as "data".
        saving: when checkpoints are written, and which stay.
        track: where numbers go beside the run folder: tensorboard, mlflow, wandb, or one of another package; names, or
            `ws.Track` objects with options.
        data: the training data, where it is known now; else `steps` gets it.
        device: "cpu" or "cuda"; CUDA where there is one, where None.
        stall: when the training counts as stuck, and what is done then: a `Stall`, or in words: "requeue", "off".
        nonfinite: what is done about a loss or gradient that is not finite: "stop", "skip" the update, "rewind" to the last
            commit and skip it there, or "ignore".
        profile: "steps=10:13": torch's profiler looks at steps 10, 11 and 12 and leaves a trace of each rank in the run folder.
        digest_every: after how many steps ranks compare the weights that they should hold alike; None for never.
        timeout: seconds that a collective may take. At the start ranks wait as long for each other, and five minutes at
            least: one of them may prepare data before it makes its Run.

    Raises:
        ConfigError, WorldError, LayoutError, OwnershipError: each before anything is written.
    """

    def __init__(
        self,
        dir: str | Path,  # noqa: A002 - the field's word
        *,
        global_batch: int,
        micro_batch: int | None = None,
        micro_per_step: int | None = None,
        duration: str | Duration,
        seed: int = 0,
        strategy: str | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        replicas: int | None = None,
        precision: str = "fp32",
        accept: Sequence[str] = (),
        saving: Saving | None = None,
        track: str | Track | Sequence[str | Track] = (),
        data: Any = None,
        device: str | None = None,
        stall: Stall | str = "",
        nonfinite: str = "stop",
        digest_every: int | None = 1000,
        profile: str = "",
        timeout: float = 600.0,
    ) -> None:
        failure.install()
        asked = Settings(
            Path(dir), global_batch, micro_batch, Duration.parse(duration), seed, strategy, Sizes(tp, pp, cp, replicas),
            precision, device, tuple(accept), saving or Saving(), nonfinite=nonfinite, digest_every=digest_every,
            track=parse(track), stall=Stall().said(stall) if isinstance(stall, str) else stall,
            profile=Window.parse(profile) if profile else None,
        ).overridden(env.read())  # fmt: skip
        self._settings = asked if micro_per_step is None else asked.with_micro_batch(None, micro_per_step)
        self._engine = Engine(session.session(self._settings.device, timedelta(seconds=timeout)), self._settings)
        self._kept = Kept()
        self._data: Source | None = None
        self._cut: BatchPlan | None = None
        self._loop: Loop | None = None
        self._problem: StepError | None = None
        self._closed = False
        self._resumed: int | None = None
        self._settled: dict[str, Any] = {}
        self._owner = start.claim(self._engine, self._settings)
        failure.note(partial(start.failed, self._owner))
        failure.explain(self._explain)
        atexit.register(self._at_exit)
        self._evaluator = Evaluator(self._engine, self._settings.micro_batch)
        if data is not None:
            self._know(data)

    def model(
        self,
        build: Callable[[], M] | M,
        *,
        name: str = "model",
        strategy: str | None = None,
        save: str = "all",
        **options: Any,
    ) -> M:
        """Build a model under its own random key and lay it over the ranks.

        Args:
            build: a module class or function without arguments, or a module that every rank made alike.
            name: how checkpoints call it; needed where there are several.
            strategy: another one than the run's, for this model.
            save: "all", or "none" for a model that checkpoints leave out.
            options: see `worldsize.strategies.base.Options`: compile, activation_checkpointing, wrap, …

        Returns:
            the model: same class, same attributes. Calling it, or a public method of it with tensors, goes through
            the strategy.
        """
        placed = self._engine.place(build, name, strategy, options)
        placed.save = save
        return placed.module  # type: ignore[return-value]

    def warm_start(
        self,
        model: nn.Module,
        source: str | Path,
        *,
        strict: bool = True,
        fresh: str | None = None,
        trust: bool = False,
    ) -> list[str]:
        """Begin with weights from elsewhere. A run that has a checkpoint of its own goes on from that instead.

        Args:
            model: what `run.model` returned.
            source: a checkpoint of ours, a torch file, safetensors, a Lightning checkpoint, a folder of accelerate,
                transformers or DeepSpeed.
            strict: refuse names that only one side has.
            fresh: a pattern of names that the source need not have, such as adapters' `*.lora_*`.
            trust: allow unpickling, which runs code from the file.

        Returns:
            names in the model that the source does not have.
        """
        self._engine.parts.refuse_late("a warm start")
        placed = self._engine.parts.placed(model)
        how: dict[str, Any] = {"strict": strict, "fresh": fresh, "trust": trust}
        return warm.start(
            placed, Path(source), self._engine.comm, **how, say=lambda line: self.say(f"worldsize: {line}")
        )

    def optimizer(self, make: Callable[..., O], *models: nn.Module, clip: float | None = None) -> O:
        """Make an optimizer over placed models.

        Args:
            make: called with the models, after they were placed.
            models: what `run.model` returned; all of the run's where none is given.
            clip: the largest norm that all its gradients together may have.
        """
        self._engine.parts.refuse_late("an optimizer")
        parts = self._engine.parts
        placed = [parts.placed(model) for model in models] or list(parts.models.values())
        modules = [each.module for each in placed]
        made = make(*modules)
        strategy = placed[0].strategy if placed else self._engine.strategy
        used = strategy.adopt(made, modules, clip)
        self._engine.notes += [strategy.notes.pop(0) for _ in strategy.notes[:]]
        named = NamedOptimizer(f"{len(parts.optimizers)}", used, {each.name: each.module for each in placed})
        parts.optimizers.append(Trained(named, placed, clip))
        return used  # type: ignore[return-value]

    def schedule(self, optimizer: Optimizer, make: Callable[[Any], Any], every: str | None = "step") -> Any:
        """Make a learning-rate schedule.

        Args:
            optimizer: which one it moves.
            make: called with the optimizer once `total_steps` is known; at once where `every` is None.
            every: "step" or "epoch": when it moves by itself; None where the program calls its `step`.

        Returns:
            the schedule where it is made at once, else None.
        """
        self._engine.parts.refuse_late("a schedule")
        scheduled = Scheduled(make, optimizer, every)
        if every is None or self._cut is not None:
            scheduled.schedule = make(optimizer)
        self._engine.parts.schedules.append(scheduled)
        return scheduled.schedule

    def average(self, model: nn.Module, decay: float) -> Average:
        """Keep an exponential moving average of a model's weights; `with average.applied():` computes with it."""
        self._engine.parts.refuse_late("an average")
        placed = self._engine.parts.placed(model)
        self._engine.parts.averages[placed.name] = average = Average(placed, decay)
        return average

    def keep(self, **objects: Any) -> Kept:
        """Put the program's own state into checkpoints.

        Args:
            objects: by name: anything with state_dict and load_state_dict, tensors, torch generators, plain values,
                lists and dicts of these. The same on every rank.

        Returns:
            the kept objects as attributes: `kept = run.keep(seen=0); kept.seen += 1`.
        """
        self._engine.parts.refuse_late("kept state")
        self._kept.add(objects)
        return self._kept

    def steps(self, data: Any = None, *, count: Count | None = None) -> Iterator[Step]:
        """The run's steps, from where it stands to its end. Saving and stopping happen between them.

        Args:
            data: a dataset, or a DataLoader as it is (its sampler's order becomes the run's own).
            count: batch -> number, or {name: number}, of what losses are counted over; samples where None.

        Raises:
            SystemExit: with code 75, after a stop was asked for and everything was committed.
        """
        if self._loop is not None:
            raise StepError("run.steps is called once", do="make another Run for another training")
        if data is not None:
            self._know(data)
        if self._data is None:
            self._know(start.generated(self._settings))
        cut, source = self._cut, self._data
        assert cut is not None
        assert source is not None
        total = None if self._settings.duration.unit == "tok" else self.total_steps
        start.schedules(self._engine)
        self._loop = start.begin(
            self._engine, self._settings, self._kept, self._owner, source,
            count=count, total=total, cut=cut, abandon=self._abandon, close=self.close,
        )  # fmt: skip
        start.settle(self._engine, self._settings, self._settled)
        self._resumed = self._loop.at.step or None
        self._engine.parts.closed = True
        failure.before_end(self._finish)
        try:
            yield from self._loop.steps()
        finally:
            self._loop.garbage.end()
        self.close()

    def rehearse(self, batches: Sequence[Any], body: Callable[[Turn], None]) -> bool:
        """Make the passes of a step before the first one, and leave no trace of them. Collective.

        Args:
            batches: micro-batches of this rank, of any size.
            body: gets a turn (`micro_batches`, `backward`), and goes through it as through a step, without `update`.

        Returns:
            whether memory sufficed on every rank. See `worldsize.train.rehearse` for what is raised.
        """
        return rehearse(self._engine, batches, body)

    def settle(self, **values: Any) -> None:
        """Keep what was found out at the start in run.json under "settled"; `begun` has it in later attempts.

        Args:
            values: by name, of plain types; the same on every rank. Before the first step.
        """
        self._engine.parts.refuse_late("what is settled")
        self._settled |= values

    @property
    def begun(self) -> dict[str, Any]:
        """What run.json says of the attempts before; empty in a new run. Collective."""
        return start.begun(self._engine, self._settings)

    @property
    def layout(self) -> dict[str, Any]:
        """How the run lies over ranks: strategy, ranks, precision, mesh; "shares": into how many parts a batch is dealt."""
        return {**self._engine.strategy.layout(), "shares": self._engine.strategy.ranks}

    def evaluate(
        self, fn: Callable[[Any], Mapping[str, Any]], data: Any, *, model: nn.Module | None = None
    ) -> dict[str, float]:
        """Means over a dataset, each sample counted once at any world size. See `Evaluator.scores`."""
        self._raise_problem()
        try:
            return self._evaluator.scores(fn, data, model)
        except Stopped:
            self._interrupted()

    def predict(self, fn: Callable[[Any], Tensor], data: Any, *, model: nn.Module | None = None) -> Tensor:
        """One row a sample, in the data's order. See `Evaluator.outputs`."""
        self._raise_problem()
        try:
            return self._evaluator.outputs(fn, data, model)
        except Stopped:
            self._interrupted()

    def best(self, value: float, mode: str = "max") -> bool:
        """Say how good the model is now. The best so far is kept by retention.

        Args:
            value: rank 0's decides, for all; NaN is never better.
            mode: "max" or "min".

        Returns:
            whether it is better than all before.
        """
        loop = self._running("best")
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode!r}", do="choose 'min' or 'max'")
        value = self._engine.comm.broadcast(float(value))
        before = loop.at.best.get("value")
        better = value == value and (before is None or (value > before if mode == "max" else value < before))  # noqa: PLR0124
        if better:
            made = loop.at.step if loop.current is None else loop.current.index + 1
            loop.at.best = {"value": value, "step": made, "mode": mode}
        return better

    def stop(self, why: str) -> None:
        """End the run after this step; after the next one, where only some ranks say so. It ends on all."""
        self._running("stop").wish = why

    def log(self, values: Mapping[str, float]) -> None:
        """Numbers of the program's own, the same on every rank; one line in metrics.jsonl and in each tracker."""
        loop = self._running("log")
        if self._closed:
            raise StepError("run.log after the end of the run", do="log inside the loop; run.evaluate works after it")
        numbers = {name: float(value) for name, value in values.items()}
        index = loop.current.index if loop.current is not None else loop.at.step
        loop.recorder.write()
        loop.tracker.log(index, numbers)
        loop.screen.say(f"step {index + 1}  " + "  ".join(f"{name} {value:.6g}" for name, value in numbers.items()))

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """A full copy of a model's state in host memory, under bare names, on every rank. Collective."""
        placed = self._engine.parts.placed(model)
        return placed.strategy.whole(placed.module)

    def say(self, text: str) -> None:
        """One line for a person, from one process of the world, past the progress display where there is one."""
        one = on_one(self._engine.comm, lambda: progress.Lines(0, None), progress.Silent())
        (one if self._loop is None else self._loop.screen).say(text)

    @property
    def comm(self) -> Comm:
        """Agreement between the ranks, for programs that need their own."""
        return self._engine.comm

    @property
    def total_steps(self) -> int:
        """Steps of the whole run. Raises StepError while the data is not known."""
        if self._cut is None:
            raise StepError("total_steps is not known before the data", do="give it early: Run(..., data=...)")
        return start.steps_in(self._settings, self._cut)

    @property
    def resumed(self) -> int | None:
        """How many steps were made when this start took over; None where it is the first, or nothing was committed."""
        self._running("resumed")
        return self._resumed

    @property
    def result(self) -> dict[str, Any]:
        """Where the run stands: step, epoch, samples, best, and why it ended."""
        self._raise_problem()
        at = self._running("result").at
        return {
            "step": at.step,
            "epoch": at.epoch,
            "samples": at.samples,
            "best": at.best,
            "done": at.done or "finished",
        }

    def close(self) -> None:
        """Give everything back; the folder is free for another attempt. Safe to call twice."""
        if self._closed:
            return
        loop, self._closed = self._loop, True
        if loop is not None:
            self._engine.watchdog.close()
            loop.profile.close()
            loop.committer.checkpointer.close()
            loop.loader.close()
            loop.screen.close()
            loop.tracker.close()
        self._evaluator.close()
        on_one(self._engine.comm, self._owner.release, None)
        failure.note(None)
        failure.explain(None)
        failure.forget(self._finish)
        # Else the interpreter would hold the run, its weights and its process groups to the end.
        atexit.unregister(self._at_exit)

    def _know(self, data: Any) -> None:
        self._settings, self._data, self._cut = start.plan(self._engine, self._settings, data)

    def _running(self, verb: str) -> Loop:
        self._raise_problem()
        if self._loop is None:
            raise StepError(f"run.{verb} belongs into the loop over run.steps()")
        return self._loop

    def _interrupted(self) -> NoReturn:
        if self._loop is not None and not self._closed:
            for average in self._engine.parts.averages.values():
                average.lift()
            self._loop.interrupted()
        self.close()
        raise SystemExit(EXIT_STOPPED)

    def _explain(self, error: BaseException) -> WorldsizeError | None:
        step = None if self._loop is None else self._loop.current
        return memory.explain(error, self._engine, self._settings, step)

    def _abandon(self, problem: StepError) -> None:
        self._problem = problem

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _finish(self, line: str = "") -> None:
        """What was to be saved when this process failed is as good as before."""
        del line
        if self._loop is not None:
            self._loop.committer.checkpointer.finish()

    def _at_exit(self) -> None:
        if failure.reported():
            return  # what was to be finished is, or was waited for long enough
        # A `break` leaves the loop without an exception: the exit code must still say that work is not committed.
        if self._problem is not None:
            failure.end(self._problem)
        self._finish()
