"""A strategy of one's own: every rank holds the whole model, and gradients are summed in one piece at the end of a step.

It needs no wrapper and nothing of the loop: forty lines, found by name through an entry point (pyproject.toml):

    pip install ./examples/own_strategy
    worldsize run --nproc-per-node 2 --strategy flat examples/strategies/train.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from worldsize.strategies import building
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import route
from worldsize.strategies.transform import transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from worldsize.strategies.base import Options


class FlatSum(Ranked):
    """Data parallel, with one all-reduce a step."""

    name = "flat"

    @property
    def averaged(self) -> int:
        """Gradients are summed, not averaged: losses keep their weight."""
        return 1

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The whole model on the device."""
        model = building.whole(build, options, self.setting.precision, self.device)
        self.refuse_differences(model)
        transform(model, options)
        return route(model, None, self.setting.precision, self.device)

    def close(self, model: nn.Module) -> None:
        """After the last micro-batch. A rank without one has no gradients, and takes part with zeros."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        used = torch.tensor([float(each.grad is not None) for each in trained], device=self.device)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
        dtype = grads[0].dtype
        flat = torch.cat([used.to(dtype), *(grad.flatten() for grad in grads)])
        dist.all_reduce(flat, group=self.peers)
        anywhere, *parts = flat.split([len(trained), *(grad.numel() for grad in grads)])
        for parameter, part, ranks in zip(trained, parts, anywhere.tolist(), strict=True):
            # What no rank used keeps no gradient: an optimizer leaves it alone, as on one rank.
            parameter.grad = part.view_as(parameter) if ranks else None

    def check_gradients(self, model: nn.Module) -> list[str]:
        """What no rank used is named, as under the other strategies."""
        return self.without_gradient(model)
