"""Room: what all of a run's steps share: parts, strategy, precision, agreement. No loop, no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import LayoutError, StepError
from worldsize.runtime.clock import Clock, DeviceClock
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed, reseeded
from worldsize.strategies import registry
from worldsize.strategies.base import Options, Padding, Setting, Strategy, brief
from worldsize.strategies.batchnorm import RunningStatistics
from worldsize.strategies.precision import Precision
from worldsize.train.digest import Replicas
from worldsize.train.finite import Guard
from worldsize.train.parts import Parts, Placed, Trained
from worldsize.train.pulse import Pulse, Unwatched, Watched
from worldsize.train.scale import LossScale

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from worldsize.runtime.comm import Comm
    from worldsize.runtime.session import Session
    from worldsize.train.settings import Settings
    from worldsize.train.step import Turn

_NORM_EVERY = 10
"""Every how many steps the gradient norm is taken for the log alone: a pass over all gradients is not free."""
_WEIGHTS = 64
"""How many different weights of losses are kept on the device."""
_ORDER: tuple[Padding, ...] = ("none", "one", "equal")


class Engine:
    """The shared machinery under `Run`.

    Args:
        session: this process among the others.
        settings: what decides the training.
    """

    def __init__(self, session: Session, settings: Settings) -> None:
        self.session, self.seed = session, settings.seed
        self.precision = Precision.of(settings.precision)
        self.parts = Parts()
        self.clock = DeviceClock() if session.device.type == "cuda" else Clock()
        self.pulse = Pulse()
        self.watchdog: Watched = Unwatched()
        self.replicas = Replicas(session.comm, self.parts.models, settings.digest_every)
        self.scale = LossScale() if self.precision.scaled else None
        self.log_norm = False
        """Whether this step's gradient norm is wanted for a log line."""
        self._strategies: dict[str, Strategy] = {}
        self._sizes, self._batch = settings.sizes, (settings.global_batch, settings.micro_batch)
        self._schedule = settings.schedule
        self.strategy = self.strategy_of(settings.strategy or registry.default(settings.sizes.shares(session.world)))
        self.notes: list[str] = []
        """Lines for a person, to be said when the next numbers are."""
        self.hold: Callable[[], None] = _nothing
        """Called before an optimizer's state changes: a save may be copying it."""
        self.guard = Guard(
            settings.nonfinite, session.comm, self.parts.models, session.device, scaled=self.precision.scaled,
            note=self.notes.append,
        )  # fmt: skip
        self._looked: set[str] = set()
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.session.device

    @property
    def comm(self) -> Comm:
        """Agreement between the ranks."""
        return self.session.comm

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by so that small gradients survive (1 except in fp16)."""
        return self.scale.value if self.scale else 1.0

    @property
    def padding(self) -> Padding:
        """What the most demanding of the strategies in use needs of idle ranks."""
        return max((strategy.padding for strategy in self._strategies.values()), key=_ORDER.index)

    def strategy_of(self, name: str) -> Strategy:
        """The strategy of that name, made once."""
        if name not in self._strategies:
            setting = Setting(
                self.session, self.precision, sizes=self._sizes, batch=self._batch, schedule=self._schedule
            )
            self._strategies[name] = registry.make(name, setting)
        return self._strategies[name]

    def place(
        self, build: Callable[[], nn.Module] | nn.Module, name: str, strategy: str | None, options: Mapping[str, Any]
    ) -> Placed:
        """Build a model under its own key and lay it over the ranks."""
        self.parts.refuse_late("a model")
        if name in self.parts.models:
            raise StepError(f"two models are named {name!r}", do="give each run.model a name= of its own")
        chosen = self.strategy if strategy is None else self.strategy_of(strategy)
        if self._sizes.pp > 1 and self.parts.models:
            raise LayoutError(
                "a pipeline is for runs of one model",
                found=f"{name!r} beside {', '.join(map(repr, self.parts.models))}",
                do="put them into one module, or use another layout than pp",
            )
        maker = build if not isinstance(build, torch.nn.Module) else lambda: build
        with reseeded(key(self.seed, "model", name), self.device):
            module = chosen.place(maker, Options.of(options))
        placed = Placed(name, module, chosen, RunningStatistics(module, chosen))
        self.parts.models[name] = placed
        return placed

    def begin_step(self, index: int) -> None:
        """Seed the loop body, equally on all ranks, and decide whether this step's gradient norm is logged."""
        self.pulse.step = index
        self.replicas.begin(index)
        reseed(key(self.seed, "body", index), self.device)
        self.log_norm = index % _NORM_EVERY == 0

    def weight(self, value: float, dtype: torch.dtype) -> Tensor:
        """A number as a 0-dim tensor on the device, made once: filling one is a launch of its own."""
        if (value, dtype) not in self._weights:
            if len(self._weights) > _WEIGHTS:
                self._weights.clear()
            self._weights[value, dtype] = torch.tensor(value, dtype=dtype, device=self.device)
        return self._weights[value, dtype]

    def wants_norm(self, entry: Trained) -> bool:
        """Whether the norm of this optimizer's gradients is needed."""
        return entry.clip is not None or self.scale is not None or self.log_norm or self.guard.needs_norm

    def check_gradients(self, placed: Placed) -> None:
        """Raises StepError where a parameter without gradient would leave ranks different."""
        missing = placed.strategy.check_gradients(placed.module)
        if not missing and placed.name not in self._looked:
            self._looked.add(placed.name)
            unused = placed.strategy.without_gradient(placed.module)
            self.notes += [f"parameters of model {placed.name!r} got no gradient: {brief(unused)}"] if unused else []
        if missing:
            raise StepError(
                f"parameters of model {placed.name!r} got no gradient in this step",
                found=brief(missing),
                do="use them, freeze them before run.model, or run.model(..., unused_parameters='allow')",
            )

    def accept_step(self, turn: Turn) -> bool:
        """Whether the optimizers move: always, except after an overflow in fp16, or where `Guard` is asked beforehand."""
        step, norm = self.pulse.step, turn.grad_norm
        if self.scale is not None and norm is not None and not self.scale.judge(finite=bool(torch.isfinite(norm))):
            return False
        return not self.guard.eager(step) or self.guard.admits(step, turn.ids, turn.loss, norm)

    def after_update(self, trained: list[Trained]) -> None:
        """Averages and schedules follow the optimizers that moved."""
        moved = {id(placed) for entry in trained for placed in entry.models}
        for average in self.parts.averages.values():
            if id(average.placed) in moved:
                average.update()
        optimizers = {id(entry.optimizer) for entry in trained}
        for scheduled in self.parts.schedules:
            if scheduled.every == "step" and id(scheduled.optimizer) in optimizers:
                scheduled.schedule.step()

    def refuse_differences(self) -> None:
        """Raises StepError where weights, or a buffer that is saved, differ between ranks. Collective."""
        self.guard.check_weights(self.pulse.step + 1)
        self.replicas.check(self.pulse.step + 1)
        for placed in self.parts.models.values():
            names = placed.strategy.differing_buffers(placed.module)
            if names:
                raise StepError(
                    f"buffers of model {placed.name!r} differ between ranks",
                    found=brief(names),
                    do="compute them from values reduced over ranks, or register them with persistent=False",
                )

    def end_epoch(self) -> None:
        """Move the schedules that move once an epoch."""
        for scheduled in self.parts.schedules:
            if scheduled.every == "epoch":
                scheduled.schedule.step()

    def check_parts(self, most: int, fewest: int) -> None:
        """What only shows when everything was made. Takes the most and the fewest micro-batches of a rank in a step.

        Raises:
            LayoutError: there is no optimizer, or SyncBatchNorm meets accumulation or idle ranks (see `RunningStatistics`).
        """
        if not self.parts.optimizers:
            raise LayoutError("there is no optimizer", do="make one with run.optimizer(...) before run.steps")
        for placed in self.parts.models.values():
            placed.statistics.refuse_synchronised(most, fewest)


def _nothing() -> None:
    """No save is copying anything."""
