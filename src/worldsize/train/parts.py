"""Room: what a run is made of: placed models, their optimizers, and who trains whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from worldsize.strategies.base import Strategy
    from worldsize.strategies.batchnorm import RunningStatistics
    from worldsize.train.average import Average
    from worldsize.train.optim import NamedOptimizer


@dataclass(slots=True)
class Placed:
    """A model where its strategy put it."""

    name: str
    module: nn.Module
    strategy: Strategy
    statistics: RunningStatistics
    save: str = "all"


@dataclass(slots=True)
class Trained:
    """An optimizer, what it trains, and how far its gradients may reach."""

    named: NamedOptimizer
    models: list[Placed]
    clip: float | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        return self.named.optimizer


@dataclass(slots=True)
class Scheduled:
    """A learning-rate schedule and when it moves."""

    make: Callable[[Any], Any]
    optimizer: Optimizer
    every: str | None
    schedule: Any = None


@dataclass(slots=True)
class Parts:
    """Everything in the order in which it was made."""

    models: dict[str, Placed] = field(default_factory=dict)
    optimizers: list[Trained] = field(default_factory=list)
    schedules: list[Scheduled] = field(default_factory=list)
    averages: dict[str, Average] = field(default_factory=dict)
    closed: bool = False

    @property
    def scattered(self) -> bool:
        """Whether ranks hold parameters of different names."""
        return any(placed.strategy.names(placed.module) is not None for placed in self.models.values())

    def refuse_late(self, what: str) -> None:
        """Raises StepError once the first step has been made."""
        if self.closed:
            raise StepError(f"{what} was made after the first step", do="make it before the loop over run.steps()")

    def placed(self, module: nn.Module) -> Placed:
        """The placed model that this module is."""
        for candidate in self.models.values():
            if candidate.module is module:
                return candidate
        raise StepError(
            f"{type(module).__name__} is not a model of this run", do="pass what run.model(...) returned, not a copy"
        )

    def trained(self, optimizer: Optimizer) -> Trained:
        """The entry of this optimizer."""
        for candidate in self.optimizers:
            if candidate.optimizer is optimizer:
                return candidate
        raise StepError("this optimizer is not one of this run", do="pass what run.optimizer(...) returned")

    def gradients(self) -> list[tuple[Placed, str, Tensor | None]]:
        """Every trainable parameter with its gradient."""
        return [
            (placed, name, parameter.grad)
            for placed in self.models.values()
            for name, parameter in placed.module.named_parameters()
            if parameter.requires_grad
        ]
