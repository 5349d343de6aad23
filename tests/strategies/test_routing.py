from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from worldsize.strategies.precision import Precision
from worldsize.strategies.routing import methods, route

CPU = torch.device("cpu")


class Net(nn.Linear):
    """A model with a method, a helper, a property and a static function."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: list[str] = []

    def encode(self, x: Tensor) -> Tensor:
        """Another way in."""
        return self.forward(x) + self._hidden(x)

    def describe(self, word: str) -> str:
        """Takes no tensor."""
        return word

    def _hidden(self, x: Tensor) -> Tensor:
        return x[:, :2]

    @property
    def width(self) -> int:
        """No method."""
        return 2

    @staticmethod
    def third(x: Tensor) -> Tensor:
        """Knows no model."""
        return x / 3


def _routed() -> tuple[Net, list[str]]:
    model, calls = Net(), []

    def entry(method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        return getattr(Net, method)(model, *args, **kwargs)

    assert route(model, entry, Precision.of("fp32"), CPU) is model
    return model, calls


def test_the_model_stays_the_users() -> None:
    """Class, name, attributes and state names are as they were."""
    model, _ = _routed()
    assert isinstance(model, Net)
    assert (type(model).__name__, type(model).__module__) == ("Net", Net.__module__)
    assert (model.width, list(model.state_dict())) == (2, ["weight", "bias"])


def test_every_way_in_goes_through_the_door_once() -> None:
    """The call, forward itself and public methods with tensors enter; what they call inside does not again."""
    model, calls = _routed()
    x = torch.ones(1, 3)
    model(x), model.forward(x), model.encode(x)
    assert calls == ["__call__", "forward", "encode"]


def test_what_takes_no_tensor_stays_outside() -> None:
    """Helpers, properties and static functions are none of the strategy's business."""
    model, calls = _routed()
    assert (model.describe("a"), float(model.third(torch.full((), 6.0)))) == ("a", 2.0)
    assert calls == []


def test_a_copy_stays_outside() -> None:
    """A copy of a placed model is the user's own."""
    model, calls = _routed()
    copy.deepcopy(model)(torch.ones(1, 3))
    assert calls == []


def test_an_error_inside_leaves_the_door_closed() -> None:
    """After a failed call the next one goes through again."""
    model, calls = _routed()
    for shape in (4, 3):
        try:
            model(torch.ones(1, shape))
        except RuntimeError:
            continue
    assert calls == ["__call__", "__call__"]


def test_public_methods_are_the_users_own() -> None:
    """Neither torch's methods nor private ones are routed."""
    assert methods(Net) == ["describe", "encode"]
