"""Room: tensor parallelism alone: all ranks work on one share of the batch, each on its part of the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worldsize.errors import LayoutError
from worldsize.runtime.sharded import is_sharded
from worldsize.strategies import building
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import route
from worldsize.strategies.transform import transform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from worldsize.strategies.base import Options, Setting


class Tensor(Ranked):
    """Layers in parts, as the plan says; what it leaves out is on every rank."""

    name = "tensor"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if self.ranks > 1:
            raise LayoutError(
                "strategy 'single' is for one share of the batch",
                found=f"{self.grid.world} ranks, of which {self.setting.sizes.model} work on a share",
                do="choose ddp, fsdp or hsdp with it",
            )

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """Modules are split one after another: with init="meta" no rank holds more than one of them whole."""
        model, fill = building.begin(build, options, self.setting.precision, self.device)
        if options.init == "here":
            self.refuse_differences(model)
        self.split(model, fill, options)(model)
        transform(model, options)
        return route(model, self.guarded(model, _Straight(model)), self.setting.precision, self.device)

    def adopt(self, optimizer: Optimizer, models: Sequence[nn.Module], clip: float | None) -> Optimizer:
        """The program's own. Parameters of two kinds cannot move in one kernel: they move one by one."""
        del models, clip
        kinds = {is_sharded(value) for group in optimizer.param_groups for value in group["params"]}
        if len(kinds) > 1:
            each = _OneByOne()
            optimizer.register_step_pre_hook(each.before)
            optimizer.register_step_post_hook(each.after)
        return optimizer


class _Straight:
    """The way into a model that needs nothing around its calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._kind = model, type(model)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._kind, method)(self._model, *args, **kwargs)


class _OneByOne:
    """Turns `foreach` and `fused` off for a step, and back: they belong to the program, and to its checkpoints."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []

    def before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._kept = [
            {key: group[key] for key in ("foreach", "fused") if key in group} for group in optimizer.param_groups
        ]
        for group, kept in zip(optimizer.param_groups, self._kept, strict=True):
            group.update(dict.fromkeys(kept, False))

    def after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group, kept in zip(optimizer.param_groups, self._kept, strict=True):
            group.update(kept)
