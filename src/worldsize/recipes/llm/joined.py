"""Room: frozen projections with adapters in eight bits: their weights' copies, and several of them as one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worldsize.recipes.llm import gated
from worldsize.recipes.llm.frozen import product, rounded

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.recipes.llm.frozen import Rounded
    from worldsize.recipes.llm.lora import Adapted


class InEight:
    """Frozen weights, one below the other, in eight bits.

    Args:
        parts: of equal inputs.
    """

    whole: Rounded
    """Once `renew` was called."""

    def __init__(self, *parts: Adapted) -> None:
        self._parts = parts
        self._versions: tuple[tuple[int, int], ...] = ()

    def renew(self) -> None:
        """Round the weights as they are now, where they have changed."""
        weights = [part.weight.detach() for part in self._parts]
        versions = tuple((weight.data_ptr(), weight._version) for weight in weights)  # noqa: SLF001 - torch has no other
        if versions == self._versions:
            return
        made = rounded(torch.cat(weights))
        if self._versions:  # where it lies already: compiled layers know the place
            for into, value in zip(self.whole, made, strict=True):
                into.copy_(value)
        else:
            self.whole = made
        self._versions = versions


class Together:
    """Projections of the same states as one product in eight bits.

    States are read and rounded once, and parts of their gradient need not be written down to be summed.

    Args:
        parts: of equal inputs, whole on each rank, without drop-out.
    """

    def __init__(self, *parts: Adapted) -> None:
        self._parts, self._eight = parts, InEight(*parts)
        self.renew = self._eight.renew

    def __call__(self, states: Tensor) -> list[Tensor]:
        """(samples, length, inputs) -> (samples, length, outputs) of each."""
        downs, ups = zip(*(part.factors for part in self._parts), strict=True)
        # One part's columns of the wide factor are nought in the rows of all others.
        found = product(states, self._eight.whole, torch.cat(downs), torch.block_diag(*ups))
        outputs = found.split([part.out_features for part in self._parts], dim=-1)
        return [part.biased(each) for part, each in zip(self._parts, outputs, strict=True)]


class Gated:
    """A gated MLP of three such projections, see `gated`.

    Args:
        gate, up, down: whole on each rank, without drop-out and biases, of one rank.
    """

    def __init__(self, gate: Adapted, up: Adapted, down: Adapted) -> None:
        self._parts, self._wide, self._narrow = (gate, up, down), InEight(gate, up), InEight(down)

    def __call__(self, states: Tensor) -> Tensor:
        """(samples, length, size) -> the same."""
        return gated.mlp(states, self._wide.whole, self._narrow.whole, *(part.factors for part in self._parts))

    def renew(self) -> None:
        """See `InEight`."""
        self._wide.renew()
        self._narrow.renew()
