"""Room: an exponential moving average of a model's weights, laid out like the model, saved under bare names.

Polyak and Juditsky, 1992. Averaged: floating-point parameters. Copied: everything else in the state (running statistics).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from worldsize.errors import ConfigError
from worldsize.runtime.sharded import local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from worldsize.runtime.stretch import Stretch
    from worldsize.train.parts import Placed


class Average:
    """`average <- decay * average + (1 - decay) * weights` after each update of the model.

    Args:
        placed: the model.
        decay: between 0 and 1, exclusive.

    Raises:
        ConfigError: the decay is out of range.
    """

    def __init__(self, placed: Placed, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigError("the decay of an average lies between 0 and 1", found=str(decay), do="0.999 is usual")
        self.placed, self.decay = placed, decay
        self._held: dict[str, Tensor] = {name: value.clone() for name, value in self._live().items()}
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._kept: dict[str, Tensor] | None = None

    def update(self) -> None:
        """Move towards the model's weights. No collective: each rank averages what it holds."""
        if self._pairs is None:
            # Found once: a state dict at each step would cost more than the average itself.
            self._pairs = self._find()
        torch._foreach_lerp_(*self._pairs, 1.0 - self.decay)
        for old, new in self._copies:
            old.copy_(new)

    def state(self) -> Mapping[str, Tensor]:
        """What checkpoints keep of it. Collective."""
        return self.placed.strategy.state(self.placed.module, self._held)

    def room(self) -> Mapping[str, Tensor | Stretch]:
        """What a checkpoint is read into. Collective."""
        return self.placed.strategy.room(self.placed.module, self._held)

    def filled(self, state: Mapping[str, Tensor | Stretch]) -> None:
        """After a checkpoint was read into what `room` gave. Collective."""
        self.placed.strategy.filled(self.placed.module, state, self._held)

    def _find(self) -> tuple[list[Tensor], list[Tensor]]:
        live = self._live()
        averaged = [name for name, _ in self.placed.module.named_parameters() if live[name].is_floating_point()]
        self._copies = [(self._held[name], live[name]) for name in live if name not in set(averaged)]
        return [local(self._held[name]) for name in averaged], [local(live[name]) for name in averaged]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the averaged weights inside this block, and in one inside it alike. Collective."""
        if self._kept is not None:
            yield
            return
        live = self._live()
        self._kept = {name: value.clone() for name, value in live.items()}
        self._put(live, self._held)
        try:
            yield
        finally:
            self.lift()

    def lift(self) -> None:
        """The model has its own weights again, also inside `applied`: what is saved there is the model. Collective."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._put(self._live(), kept)

    def _live(self) -> dict[str, Tensor]:
        return self.placed.strategy.held(self.placed.module)

    def _put(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in live.items():
                value.copy_(values[name])
        self.placed.strategy.changed(self.placed.module)
