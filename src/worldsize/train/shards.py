"""Room: an optimizer's step on the shards themselves.

torch computes on each DTensor through Python, which for some hundred of them takes the host several times as long as the
launches. Where an optimizer makes every number from those of the same place alone, the step on this rank's shards is the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as hooks

from worldsize.runtime.sharded import held, is_sharded, like

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer

_BY_PLACE = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip

_State = defaultdict[Any, dict[str, Any]]


class ShardStep:
    """Makes the steps of one optimizer: on plain tensors in place of its sharded parameters, while a step lasts.

    Args:
        optimizer: of torch's own classes; any other makes its steps as it always does.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Tensor, _Shard] = {}
        if type(optimizer) in _BY_PLACE:
            # What was loaded takes the place of tensors that nobody should keep. Without `self`: it holds the optimizer.
            known = self._known
            optimizer.register_load_state_dict_post_hook(lambda _: known.clear())

    def __call__(self) -> None:
        """Make a step."""
        entered = self._entered() if self._apart() else None
        if entered is None:
            self._known.clear()
            self._optimizer.step()
            return
        groups, state, known = self._optimizer.param_groups, self._optimizer.state, self._known
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [known[value].stand_in if value in known else value for value in group["params"]]
        self._optimizer.state = entered
        try:
            self._optimizer.step()
        finally:
            self._optimizer.state = state
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
                self._leave(parameters, state, entered)

    def _apart(self) -> bool:
        """Whether nobody looks at the parameters in a step, and each number stands for itself."""
        made = self._optimizer
        own = vars(made).get("step")  # schedules put a counter of calls there, around the class's own
        return (
            type(made) in _BY_PLACE
            and (own is None or (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is type(made).step))
            and not any(group.get("differentiable") for group in made.param_groups)
            and not (made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks)  # noqa: SLF001 - torch has no other
            and not (hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks)  # noqa: SLF001
        )

    @torch.no_grad()
    def _entered(self) -> _State | None:
        """The state by stand-ins; None where there is no shard, or one that lies otherwise than its gradient or state."""
        state: _State = defaultdict(dict)
        found: dict[Tensor, _Shard] = {}
        for group in self._optimizer.param_groups:
            for value in group["params"]:
                mover, slots = value, self._optimizer.state.get(value)
                if is_sharded(value):
                    shard = found[value] = self._shard(value)
                    mover, slots = shard.stand_in, shard.enter(slots)
                    if slots is None:
                        return None
                if slots:
                    state[mover] = slots
        self._known.clear()
        self._known.update(found)
        return state if found else None

    def _shard(self, value: DTensor) -> _Shard:
        known = self._known.get(value)
        return known if known is not None and known.part is held(value) else _Shard(value)

    @torch.no_grad()
    def _leave(self, values: list[Tensor], state: _State, entered: _State) -> None:
        for value in values:
            shard = self._known.get(value)
            if shard is not None:
                shard.leave(state, entered.get(shard.stand_in))
            elif value in entered:
                state[value] = entered[value]


class _Shard:
    """A sharded parameter, and the plain one that stands for it."""

    def __init__(self, whole: DTensor) -> None:
        self.whole, self.part = whole, held(whole)
        self.stand_in = nn.Parameter(self.part.detach(), requires_grad=False)
        self._slots: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}

    def enter(self, slots: dict[str, Any] | None) -> dict[str, Any] | None:
        """Give the stand-in its gradient; its state. None where it cannot stand for the parameter."""
        grad = self.whole.grad
        part = self._part(grad)
        if grad is not None and (part is None or not _fits(part, self.part)):
            return None
        parts: dict[str, Any] = {}
        for key, value in (slots or {}).items():
            known = key in self._parts and self._slots[key] is value
            parts[key] = self._parts[key] if known else self._part(value)
            if parts[key] is None and value is not None:
                return None
        self._slots, self._parts = dict(slots or {}), parts
        self.stand_in.grad = part
        return dict(parts)

    def leave(self, state: _State, parts: dict[str, Any] | None) -> None:
        """Take the gradient away from the stand-in, and the state that is new to where the parameter's belongs."""
        if self.stand_in.grad is not None:
            self.stand_in.grad = None
            torch.autograd.graph.increment_version(self.whole)  # a graph of before the step is out of date
        for key, value in (parts or {}).items():
            if key not in self._parts or self._parts[key] is not value:
                same = isinstance(value, torch.Tensor) and value.shape == self.part.shape
                self._slots[key] = state[self.whole][key] = like(value, self.whole) if same else value
                self._parts[key] = value

    def _part(self, value: Any) -> Any:
        """What lies here of a gradient or of a part of the state; None where it lies otherwise than the parameter."""
        if not is_sharded(value):
            return value
        if value.placements != self.whole.placements or value.device_mesh != self.whole.device_mesh:
            return None
        found: Tensor = held(value)
        return found if type(found) is torch.Tensor else None


def _fits(grad: Tensor, part: Tensor) -> bool:
    """Whether it can be the gradient of a plain parameter. One of no dimensions could not be told from a count of steps."""
    return grad.dtype is part.dtype and grad.shape == part.shape and part.ndim > 0
