from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.strategies.fitting import Fit, attempt, micro, opened, placed
from tests.strategies.models import (
    WIDTH,
    AllFrozen,
    Block,
    Blocks,
    Buffers,
    Scalar,
    Unused,
    penalty,
    plain,
    sometimes,
)
from worldsize.runtime import session
from worldsize.strategies.base import full

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.testing.ranks import RankPool


def _step(name: str, build: Any, loss: Any = plain, **options: Any) -> str:
    def call() -> None:
        strategy = opened(name)
        Fit(strategy, placed(strategy, build, **options), loss).step(0)

    return attempt(call)


def _missing(name: str, build: Any, loss: Any = plain) -> list[str]:
    strategy = opened(name)
    model = placed(strategy, build)
    made = Fit(strategy, model, loss)
    made.micro(0, strategy.rank, last=True)
    return strategy.check_gradients(model)


def _refrozen(name: str, *, value: bool) -> str:
    strategy = opened(name)
    made = Fit(strategy, placed(strategy, Blocks if not value else AllFrozenButHead))
    made.step(0)
    next(made.model.parameters()).requires_grad_(value)
    return attempt(lambda: made.step(1))


class AllFrozenButHead(Blocks):
    """Only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(requires_grad=False)


def _past_the_door(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
    del number
    assert isinstance(model, Blocks)
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    return nn.functional.cross_entropy(model.head(hidden), y, reduction="none")


class Sometimes(Unused):
    """Every parameter is used, some only in one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        del self.never


def _sometimes(name: str) -> str:
    strategy = opened(name)
    made = Fit(strategy, placed(strategy, Sometimes), sometimes)
    said = ""

    def call() -> None:
        nonlocal said
        for number in (0, 1):
            made.micro(0, 2 * strategy.rank + number, last=number == 1)
        said = str(strategy.check_gradients(made.model))

    return attempt(call).replace("passed", said)


class Stored(Blocks):
    """Keeps a method that was bound before the model was placed."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = self.encode


def _bound_before(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
    del y, number
    assert isinstance(model, Stored)
    hidden: Tensor = model.stored(x)
    return hidden.square().sum(1)


def _two_backwards(name: str) -> str:
    strategy = opened(name)
    model = placed(strategy, Blocks)
    x, _ = micro(0, strategy.rank)

    def call() -> None:
        strategy.exchange(model, last=True)
        out = model(x)
        for column in (0, 1):
            out[:, column].sum().backward(retain_graph=True)
            strategy.sent(model)

    return attempt(call)


def _not_reached(name: str) -> str:
    strategy = opened(name)
    made = Fit(strategy, placed(strategy, Blocks))
    made.micro(0, 0, last=False)
    strategy.exchange(made.model, last=True)
    torch.ones((), requires_grad=True).backward()
    strategy.sent(made.model)
    return attempt(lambda: strategy.check_gradients(made.model))


def _scaled_by_rank(name: str) -> str:
    strategy = opened(name)

    def build() -> nn.Module:
        model = Blocks()
        with torch.no_grad():
            model.head.weight.mul_(strategy.rank + 1)
        return model

    return attempt(lambda: placed(strategy, build))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU())


def _all(name: str) -> dict[str, Any]:
    return {
        "unused": _step(name, Unused),
        "sometimes": _sometimes(name),
        "frozen later": _refrozen(name, value=False),
        "thawed later": _refrozen(name, value=True),
        "past the door": _step(name, Blocks, _past_the_door) if name == "ddp" else "",
        "bound before": _step(name, Stored, _bound_before) if name == "ddp" else "",
        "two backwards": _two_backwards(name),
        "not reached": _not_reached(name),
        "different weights": _scaled_by_rank(name),
        "lazy": _step(name, _lazy),
        "scalar": _step(name, Scalar),
        "single": attempt(lambda: opened("single")),
        "second derivative": _step(name, Blocks, penalty),
        "frozen model": _missing(name, AllFrozen, _nothing),
        "no parameters": _missing(name, nn.Flatten, _nothing),
    }


def _nothing(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
    del y, number
    out: Tensor = model(x)
    return out.sum(1) * torch.ones((), requires_grad=True)


@pytest.fixture(scope="module")
def said(two: RankPool) -> dict[str, dict[str, Any]]:
    """What each strategy said to every misuse, on rank 0, where both ranks said the same."""
    found = {}
    for name in ("ddp", "fsdp"):
        first, second = two.run(_all, name, timeout=200)
        found[name], found[f"{name} on rank 1"] = first, second
        assert {**first, "sometimes": ""} == {**second, "sometimes": ""}
    return found


BOTH = pytest.mark.parametrize("name", ["ddp", "fsdp"])


@BOTH
def test_parameters_without_gradient_are_named(name: str, said: dict[str, dict[str, Any]]) -> None:
    """A head that no pass uses is named with its parameters (B068)."""
    assert "never.weight, never.bias, sometimes.weight, sometimes.bias" in said[name]["unused"]


def test_what_only_some_micro_batches_use_is_named_by_ddp(said: dict[str, dict[str, Any]]) -> None:
    """DDP exchanges in the last micro-batch; what only earlier ones used would stay a rank's own (B068, B069)."""
    assert "sometimes.weight" in said["ddp"]["sometimes"]
    assert "unused_parameters='allow'" in said["ddp"]["sometimes"]


def test_what_only_one_rank_uses_is_named_by_fsdp_elsewhere(said: dict[str, dict[str, Any]]) -> None:
    """FSDP reduces what any micro-batch used; a rank that never used a parameter names it (B068)."""
    assert said["fsdp"]["sometimes"] == "[]"
    assert said["fsdp on rank 1"]["sometimes"] == "['sometimes.weight', 'sometimes.bias']"


@BOTH
@pytest.mark.parametrize("case", ["frozen later", "thawed later"])
def test_freezing_after_placing_is_refused(name: str, case: str, said: dict[str, dict[str, Any]]) -> None:
    """Changing requires_grad after run.model is an error at the next step, with the parameter's name."""
    assert "blocks.0.a.weight" in said[name][case]
    assert "requires_grad was changed" in said[name][case]


@pytest.mark.parametrize("case", ["past the door", "bound before"])
def test_a_bypass_of_ddp_is_refused(case: str, said: dict[str, dict[str, Any]]) -> None:
    """Gradients that came past the model's door would leave the ranks with different ones: an error says so."""
    assert "past the exchange" in said["ddp"][case]


def test_a_second_backward_through_one_forward_is_refused_by_ddp(said: dict[str, dict[str, Any]]) -> None:
    """DDP exchanges one backward pass a forward pass; a second one would stay local. FSDP reduces each."""
    assert "add losses up" in said["ddp"]["two backwards"]
    assert said["fsdp"]["two backwards"] == "passed"


@BOTH
def test_a_last_micro_batch_that_misses_the_model_is_refused(name: str, said: dict[str, dict[str, Any]]) -> None:
    """Gradients of earlier micro-batches that the last one does not exchange are an error, not silence."""
    assert "did not reach the model" in said[name]["not reached"]


@BOTH
def test_ranks_that_built_different_weights_are_refused(name: str, said: dict[str, dict[str, Any]]) -> None:
    """No strategy trains a mixture of what ranks built."""
    assert "head.weight" in said[name]["different weights"]


@BOTH
def test_lazy_modules_are_refused(name: str, said: dict[str, dict[str, Any]]) -> None:
    """A module without shapes is named."""
    assert "0.weight" in said[name]["lazy"]


def test_single_numbers_are_refused_by_fsdp_alone(said: dict[str, dict[str, Any]]) -> None:
    """A 0-dim parameter cannot be sharded; the error names it."""
    assert "scale" in said["fsdp"]["scalar"]
    assert said["ddp"]["scalar"] == "passed"


@BOTH
def test_single_is_for_one_rank(name: str, said: dict[str, dict[str, Any]]) -> None:
    """The single strategy on two ranks is an error with the number."""
    assert "2 ranks" in said[name]["single"]


def test_second_derivatives_over_several_units_are_refused(said: dict[str, dict[str, Any]]) -> None:
    """FSDP over several units would lose them in silence; DDP is exact."""
    assert "3 units" in said["fsdp"]["second derivative"]
    assert said["ddp"]["second derivative"] == "passed"


@BOTH
@pytest.mark.parametrize("case", ["frozen model", "no parameters"])
def test_models_without_anything_to_train_are_placed(name: str, case: str, said: dict[str, dict[str, Any]]) -> None:
    """A model that is frozen or has no parameters works and misses nothing."""
    assert said[name][case] == []


def _blocks_alone(name: str) -> dict[str, Any]:
    strategy = opened(name)
    made = Fit(strategy, placed(strategy, Blocks), _one_block)
    made.micro(0, 0, last=False)
    strategy.exchange(made.model, last=True)
    x, y = micro(1, strategy.rank)
    _one_block(made.model, x, y, 0).sum().backward()
    strategy.sent(made.model)
    grads = {key: value.grad for key, value in made.model.named_parameters()}
    return {key: full(grad).tolist() for key, grad in grads.items() if grad is not None}


def _one_block(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
    del y, number
    assert isinstance(model, Blocks)
    block = model.blocks[0]
    assert isinstance(block, Block)
    out: Tensor = model(x).sum(1, keepdim=True) + block(x)
    return out.sum(1)


@BOTH
def test_a_submodule_beside_the_model_goes_through(name: str, two: RankPool) -> None:
    """Calling a block in addition to the model, before one backward, gives every rank the same gradients."""
    first, second = two.run(_blocks_alone, name)
    assert first == second
    assert first


def test_single_refuses_freezing_too() -> None:
    """What is refused on many ranks is refused on one."""
    try:
        assert "requires_grad was changed" in _refrozen("single", value=False)
    finally:
        session.close()


class Stateful(Buffers):
    """Moves one buffer by what it sees, and one by nothing but its calls; a third is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(()), persistent=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        """Note the mean of the input."""
        self.mean = torch.lerp(self.mean, x.mean(), 0.1)
        self.cache = x.mean()
        self.steps += 1
        return super().forward(self.norm(x))


def _differing(name: str) -> list[str]:
    strategy = opened(name)
    made = Fit(strategy, placed(strategy, Stateful))
    made.step(0)
    return strategy.differing_buffers(made.model)


@BOTH
def test_buffers_that_ranks_moved_apart_are_named(name: str, two: RankPool) -> None:
    """A saved buffer that depends on what its rank saw is named; composed statistics, counters and caches are not."""
    assert two.run(_differing, name) == [["mean"]] * 2
