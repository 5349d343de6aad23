"""Room: a loop of a few lines over the interface of strategies, and what came of it on every rank."""

from __future__ import annotations

import functools
import traceback
from typing import TYPE_CHECKING, Any

import torch

from tests.strategies.models import CASES, WIDTH, Blocks, plain
from worldsize.data.batch import deal
from worldsize.errors import StepError, WorldsizeError
from worldsize.runtime import session
from worldsize.runtime.grid import Sizes
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed, reseeded
from worldsize.strategies import registry
from worldsize.strategies.base import Options, Setting, Strategy
from worldsize.strategies.batchnorm import RunningStatistics
from worldsize.strategies.norm import gradients, norm
from worldsize.strategies.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

MICROS, SAMPLES = 6, 4


def opened(name: str, precision: str = "fp64", device: str = "cpu", **sizes: Any) -> Strategy:
    """The strategy on this rank's session."""
    return registry.make(name, Setting(session.session(device), Precision.of(precision), sizes=Sizes(**sizes)))


def placed(strategy: Strategy, build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """A model under its random key."""
    with reseeded(key(7, "model")):
        return strategy.place(build, Options.of(options))


def micro(step: int, index: int) -> tuple[Tensor, Tensor]:
    """One micro-batch of the endless data."""
    source = torch.Generator().manual_seed(key(0, step, index))
    x = torch.randn(SAMPLES, WIDTH, generator=source, dtype=torch.float64)
    return x, torch.randint(3, (SAMPLES,), generator=source)


class Fit:
    """A model in training, step by step."""

    def __init__(self, strategy: Strategy, model: nn.Module, loss: Callable[..., Tensor] = plain) -> None:
        self.strategy, self.model, self.loss = strategy, model, loss
        groups: list[dict[str, Any]] = [
            {"params": [value for value in model.parameters() if value.dim() > 1], "weight_decay": 0.1},
            {"params": [value for value in model.parameters() if value.dim() < 2]},
        ]
        # Gradients are divided by eps at least, and their rounding with them: by 1e-8, weights are 2e-12 apart on some CPUs.
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        self.statistics = RunningStatistics(model, strategy)
        self.others: list[tuple[Strategy, nn.Module]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, index: int) -> None:
        """One optimizer step over `MICROS` micro-batches, dealt over the ranks."""
        self.statistics.begin()
        start, stop = deal(MICROS, self.strategy.ranks)[self.strategy.rank]
        total = 0.0
        for number in range(start, stop):
            total += self.micro(index, number, last=number == stop - 1)
        missing = self.strategy.check_gradients(self.model)
        if missing:
            raise StepError("no gradient", found=", ".join(missing))
        self.statistics.compose()
        self.losses += self.strategy.setting.session.comm.sum([total])
        self.norms.append(float(norm(gradients(self.model.parameters()), self.strategy.device)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for _, model in self.others:
            model.zero_grad()

    def micro(self, step: int, number: int, *, last: bool) -> float:
        """Forward and backward of one micro-batch. Returns its share of the step's loss."""
        self.strategy.exchange(self.model, last=last)
        for strategy, model in self.others:
            strategy.stand_by(model, last=last)
        x, y = micro(step, number)
        device = self.strategy.device
        x, y = x.to(device, self.strategy.setting.precision.parameters), y.to(device)
        reseed(key(1, step, number), device)
        share = self.loss(self.model, x, y, number).sum() / (MICROS * SAMPLES)
        (share * self.strategy.averaged).backward()
        self.strategy.sent(self.model)
        return float(share.detach())

    def outcome(self) -> dict[str, Any]:
        """Losses, norms and final state."""
        state = {name: value.tolist() for name, value in self.strategy.whole(self.model).items()}
        return {"losses": self.losses, "norms": self.norms, "state": state}


def fit(name: str, case: str, steps: int = 3, **sizes: Any) -> dict[str, Any]:
    """Train one of the cases."""
    wanted, strategy = CASES[case], opened(name, **sizes)
    made = Fit(strategy, placed(strategy, wanted.build, **wanted.options), wanted.loss)
    for index in range(steps):
        made.step(index)
    return made.outcome()


def fit_all(name: str, ranks: int, **sizes: Any) -> dict[str, Any]:
    """Train all cases for so many ranks; what stopped one takes the place of its outcome."""
    found: dict[str, Any] = {}
    for case in [case for case, wanted in CASES.items() if ranks == 1 or ranks in wanted.ranks]:
        try:
            found[case] = fit(name, case, **sizes)
        except Exception:  # noqa: BLE001 - shown by the case's own test
            found[case] = traceback.format_exc()
    return found


def fit_pair(first: str, second: str) -> dict[str, Any]:
    """Two models in turns, as adversaries: each step trains the second one alone, then the first one through it."""
    one, two = opened(first), opened(second)
    maker, critic = placed(one, functools.partial(Blocks, out=WIDTH)), placed(two, Blocks)
    fits = [Fit(two, critic, lambda _, x, y, micro: plain(critic, maker(x).detach(), y, micro))]
    fits += [Fit(one, maker, lambda _, x, y, micro: -plain(critic, maker(x), y, micro))]
    for index in range(3):
        for fit_, other, model in ((fits[0], one, maker), (fits[1], two, critic)):
            fit_.others = [(other, model)]
            fit_.step(index)
    return {"maker": fits[1].outcome(), "critic": fits[0].outcome()}


def attempt(call: Callable[[], object]) -> str:
    """What an error says; "passed" where there is none."""
    try:
        call()
    except WorldsizeError as error:
        return f"{type(error).__name__}: {error}"
    return "passed"
