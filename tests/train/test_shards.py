"""An optimizer's step on the shards themselves: the same numbers, and nothing of it is left behind."""

from __future__ import annotations

import gc
from copy import deepcopy
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.pools import together
from worldsize.train import shards
from worldsize.train.shards import ShardStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from worldsize.runtime.comm import Comm

SHAPES = ((5, 3), (1, 4), (7,), (2, 2))
"""Over two ranks: uneven, nothing on one of them, and even; the last is not sharded."""


def parameters(comm: Comm, *, cut: bool = True) -> list[nn.Parameter]:
    """The same values at each call; all but the last sharded over the ranks, or none."""
    mesh, draw = init_device_mesh("cpu", (comm.size,)), torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    kept = [distribute_tensor(value, mesh, [Shard(0)]) if cut else value for value in made[:-1]]
    return [nn.Parameter(value) for value in [*kept, made[-1]]]


def pushed(values: list[nn.Parameter], step: int) -> None:
    """Give them gradients, but for one that has none in the first step."""
    draw = torch.Generator().manual_seed(step + 1)
    for index, value in enumerate(values):
        grad = torch.randn(SHAPES[index], generator=draw, dtype=torch.float64)
        if isinstance(value, DTensor):
            grad = distribute_tensor(grad, value.device_mesh, value.placements)
        value.grad = None if index == 0 and step == 0 else grad


def full(value: Any) -> Any:
    """The whole of a tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def seen(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameters and state, whole, by their names. The state of a shard lies as it does."""
    values = [value for group in optimizer.param_groups for value in group["params"]]
    assert set(optimizer.state) <= set(values)
    for value, slots in optimizer.state.items():
        assert all(
            type(each) is type(value.data) for each in slots.values() if getattr(each, "shape", ()) == value.shape
        )
    return [
        {"": full(value.data), **{key: full(each) for key, each in optimizer.state[value].items()}}
        for value in values
    ]


def trained(comm: Comm, make: Callable[[Any], Optimizer], *, cut: bool) -> list[dict[str, Any]]:
    """Five steps, a schedule's changes, and what is loaded in between."""
    values = parameters(comm, cut=cut)
    optimizer = make(values)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = ShardStep(optimizer) if cut else optimizer.step
    for number in range(5):
        pushed(values, number)
        step()
        schedule.step()
        if number == 2:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    return seen(optimizer)


def test_the_schedule_is_no_reason_to_look_at_whole_tensors() -> None:
    """It puts its counter around the step."""

    def look(comm: Comm) -> bool:
        optimizer = torch.optim.SGD(parameters(comm), lr=0.1)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return ShardStep(optimizer)._apart()

    assert together(look, 1) == [True]


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
WAYS: list[tuple[Any, dict[str, bool]]] = [(kind, {}) for kind in shards._BY_PLACE] + [
    (kind, {"foreach": True}) for kind in shards._BY_PLACE
]
WAYS += [(kind, {"fused": True}) for kind in FUSED]


@pytest.mark.parametrize(("kind", "how"), WAYS, ids=lambda it: "".join(it) if isinstance(it, dict) else it.__name__)
def test_the_steps_are_those_on_whole_tensors(kind: Any, how: dict[str, bool]) -> None:
    """Values and state of each class; some of these steps torch itself does not know for shards."""

    def both(comm: Comm) -> tuple[Any, Any]:
        def make(values: Any) -> Optimizer:
            made: Optimizer = kind(values, lr=0.1, **how)
            return made

        return trained(comm, make, cut=True), trained(comm, make, cut=False)

    for found, wanted in together(both, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_step_is_made_on_plain_tensors() -> None:
    """Otherwise nothing would be gained."""

    def look(comm: Comm) -> list[bool]:
        optimizer = torch.optim.SGD(parameters(comm), lr=0.1)
        pushed(optimizer.param_groups[0]["params"], 1)
        return [isinstance(value, DTensor) for value in looked_at(optimizer, ShardStep(optimizer))]

    assert together(look, 1) == [[False] * 4]


def looked_at(optimizer: Optimizer, step: Callable[[], None]) -> list[Any]:
    """What the optimizer finds in its groups, in a step."""
    found: list[Any] = []
    inner: Any = optimizer._init_group  # type: ignore[attr-defined]

    def init_group(group: Any, *args: Any) -> Any:
        found.extend(group["params"])
        return inner(group, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_init_group", init_group)
        step()
    return found


class Own(torch.optim.SGD):
    """A class of the program's own may look at whole tensors."""


@pytest.mark.parametrize(
    "which", ["own class", "hook", "own step", "wrapped step", "laid otherwise", "in other numbers"]
)
def test_who_looks_at_whole_tensors_is_given_them(which: str) -> None:
    """Nothing is known of what it does with them."""

    def look(comm: Comm) -> bool:
        values: list[Any] = parameters(comm)[:-1]
        optimizer = (Own if which == "own class" else torch.optim.SGD)(values, lr=0.1)
        pushed(values, 1)
        if which == "hook":
            optimizer.register_step_pre_hook(lambda *_: None)
        elif which == "own step":
            optimizer.step = partial(optimizer.step)  # type: ignore[method-assign]
        elif which == "wrapped step":
            optimizer.step = wraps(type(optimizer).step)(partial(optimizer.step))  # type: ignore[method-assign]
        elif which == "laid otherwise":
            values[0].grad = values[0].grad.redistribute(placements=[Replicate()])
        elif which == "in other numbers":
            values[0].grad, values[0].grad_dtype = None, None
            values[0].grad = distribute_tensor(torch.ones(5, 3), values[0].device_mesh, [Shard(0)])
        found = looked_at(optimizer, ShardStep(optimizer))
        return all(one is other for one, other in zip(found, values, strict=True))

    assert together(look, 1) == [True]


def test_an_error_leaves_the_optimizer_as_it_was() -> None:
    """Groups, state and gradients are those of the program."""

    def look(comm: Comm) -> bool:
        values = parameters(comm)
        optimizer = torch.optim.AdamW(values, lr=0.1)
        step = ShardStep(optimizer)
        for number in (0, 1):
            pushed(values, number)
            step()
        before = seen(optimizer)
        optimizer.param_groups[0]["betas"] = (0.9, "odd")
        with pytest.raises((TypeError, RuntimeError)):
            step()
        kept = all(one is other for one, other in zip(optimizer.param_groups[0]["params"], values, strict=True))
        return kept and len(seen(optimizer)) == len(before)

    assert together(look, 1) == [True]


def test_gradients_are_not_held() -> None:
    """Their memory is that of the next passes."""

    def look(comm: Comm) -> list[bool]:
        values = parameters(comm)
        optimizer = torch.optim.AdamW(values, lr=0.1)
        step = ShardStep(optimizer)
        pushed(values, 1)
        step()
        return [shard.stand_in.grad is None for shard in step._known.values()]

    assert together(look, 1) == [[True] * 3]


def test_what_was_loaded_sets_the_old_state_free() -> None:
    """Two of them may be more than the memory holds."""

    def look(comm: Comm) -> int:
        values = parameters(comm)
        optimizer = torch.optim.AdamW(values, lr=0.1)
        step = ShardStep(optimizer)
        pushed(values, 1)
        step()
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        return len(step._known)

    assert together(look, 1) == [0]


def test_a_state_may_be_nothing() -> None:
    """As that of a step without momentum was, in checkpoints of older torch."""

    def look(comm: Comm) -> list[bool]:
        values = parameters(comm)
        optimizer = torch.optim.SGD(values, lr=0.1, momentum=0.9)
        optimizer.state[values[0]]["momentum_buffer"] = None
        pushed(values, 1)
        ShardStep(optimizer)()
        return [isinstance(optimizer.state[value]["momentum_buffer"], DTensor) for value in values[:-1]]

    assert together(look, 1) == [[True] * 3]


def test_a_graph_of_before_the_step_is_out_of_date() -> None:
    """As it is without shards: its gradients would be those of other weights."""

    def look(comm: Comm) -> str:
        values = parameters(comm)[:1]
        optimizer = torch.optim.SGD(values, lr=0.1)
        loss = values[0].square().sum()
        pushed(values, 1)
        ShardStep(optimizer)()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        return ""

    assert "modified by an inplace operation" in together(look, 1)[0]


def test_the_optimizer_ends_with_its_last_name() -> None:
    """Not with a collection of garbage: the next run may need its state's memory."""

    def look(comm: Comm) -> bool:
        optimizer = torch.optim.SGD(parameters(comm), lr=0.1)
        step = ShardStep(optimizer)
        pushed(optimizer.param_groups[0]["params"], 1)
        step()
        ended = ref(optimizer)
        gc.disable()
        del optimizer, step
        try:
            return ended() is None
        finally:
            gc.enable()

    assert together(look, 1) == [True]
