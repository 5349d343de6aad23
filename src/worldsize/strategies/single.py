"""Room: one process, one device, no wrapper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import LayoutError
from worldsize.strategies import building
from worldsize.strategies.base import Options, Setting, Strategy
from worldsize.strategies.routing import route
from worldsize.strategies.transform import transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Single(Strategy):
    """The whole model in one process."""

    name = "single"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if self.grid.world > 1:
            raise LayoutError(
                "strategy 'single' is for one rank",
                found=f"{self.grid.world} ranks",
                do="choose ddp or fsdp, or one rank",
            )

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model on the device; forward passes under autocast where the precision says so."""
        model = building.whole(build, options, self.setting.precision, self.device)
        transform(model, options)
        return route(model, None, self.setting.precision, self.device)
