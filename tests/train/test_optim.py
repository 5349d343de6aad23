"""An optimizer's state goes out by name and comes back, whatever the optimizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn, optim

from worldsize.errors import CheckpointError, ConfigError
from worldsize.train.optim import NamedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, 1e-2),
    "Adam amsgrad": lambda p: optim.Adam(p, 1e-2, amsgrad=True),
    "SGD momentum": lambda p: optim.SGD(p, 1e-2, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, 1e-2),
    "RAdam": lambda p: optim.RAdam(p, 1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-2),
    "LBFGS": lambda p: optim.LBFGS(p, 0.1, max_iter=3, history_size=4),
}


def build() -> nn.Module:
    """A parameter of three never gets a gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return net


def steps(net: nn.Module, optimizer: Optimizer, first: int, stop: int) -> list[float]:
    """Losses of a few steps; each draws its batch by its number."""
    losses = []
    for number in range(first, stop):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))

        def closure(x: torch.Tensor = x) -> float:
            optimizer.zero_grad()
            loss = (net(x) ** 2).mean()
            loss.backward()
            return float(loss.detach())

        losses.append(float(optimizer.step(closure)))
    return losses


def transfer(source: NamedOptimizer, target: NamedOptimizer) -> None:
    """As through a checkpoint."""
    tensors, skeleton = source.state()
    skeleton = json.loads(json.dumps(skeleton))
    wanted = target.wanted(skeleton)
    assert wanted.keys() == tensors.keys()
    for name, empty in wanted.items():
        assert isinstance(empty, torch.Tensor)
        assert (empty.shape, empty.dtype) == (tensors[name].shape, tensors[name].dtype), name
        empty.copy_(tensors[name])
    target.load(wanted, skeleton)


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_as_if_nothing_had_happened(name: str) -> None:
    """Bit for bit: state, step counts, hyperparameters; a parameter without gradient needs no state."""
    straight = build()
    whole = steps(straight, MAKERS[name](straight.parameters()), 0, 6)
    first, second = build(), build()
    one = NamedOptimizer("0", MAKERS[name](first.parameters()), {"model": first})
    assert steps(first, one.optimizer, 0, 3) == whole[:3]
    two = NamedOptimizer("0", MAKERS[name](second.parameters()), {"model": second})
    second.load_state_dict(first.state_dict())
    transfer(one, two)
    assert steps(second, two.optimizer, 3, 6) == whole[3:]


def test_names_are_those_of_the_model() -> None:
    """State lies beside the parameter that it belongs to."""
    net = build()
    named = NamedOptimizer("0", optim.AdamW(net.parameters()), {"model": net})
    steps(net, named.optimizer, 0, 1)
    assert "model.0.weight/exp_avg" in named.state()[0]
    assert not any("unused" in name for name in named.state()[0])


def groups(net: nn.Module, rate: float) -> Optimizer:
    """Two groups with rates of their own."""
    heads = [p for n, p in net.named_parameters() if n.startswith("1")]
    rest = [p for n, p in net.named_parameters() if not n.startswith("1")]
    each: list[dict[str, Any]] = [{"params": rest}, {"params": heads, "lr": rate, "betas": (0.8, 0.9)}]
    return optim.AdamW(each, 1e-3)


def test_groups_keep_their_own_hyperparameters() -> None:
    """Also tuples, which JSON does not have."""
    first, second = build(), build()
    one = NamedOptimizer("0", groups(first, 0.5), {"model": first})
    two = NamedOptimizer("0", groups(second, 0.1), {"model": second})
    steps(first, one.optimizer, 0, 1)
    transfer(one, two)
    assert [group["lr"] for group in two.optimizer.param_groups] == [1e-3, 0.5]
    assert two.optimizer.param_groups[1]["betas"] == (0.8, 0.9)


def test_other_groups_are_refused() -> None:
    """With how many parameters each has."""
    first, second = build(), build()
    one = NamedOptimizer("0", groups(first, 0.5), {"model": first})
    two = NamedOptimizer("0", optim.AdamW(second.parameters()), {"model": second})
    with pytest.raises(CheckpointError, match=r"groups are not those.*groups of \[5\] now, of \[3, 2\] before"):
        two.wanted(one.state()[1])


def test_other_parameters_are_named() -> None:
    """The first few on each side."""
    first, second = build(), nn.Linear(3, 4)
    one = NamedOptimizer("0", optim.SGD(first.parameters(), 0.1), {"model": first})
    two = NamedOptimizer("0", optim.SGD(second.parameters(), 0.1), {"model": second})
    with pytest.raises(CheckpointError, match=r"only now \['model.bias', 'model.weight'\], only before"):
        two.wanted(one.state()[1])


def test_a_foreign_parameter_is_refused() -> None:
    """Made from another model than the one it was given: it would train nothing."""
    with pytest.raises(ConfigError, match=r"belongs to none of its models.*\(4, 3\)"):
        NamedOptimizer("0", optim.SGD(nn.Linear(3, 4).parameters(), 0.1), {"model": build()})
