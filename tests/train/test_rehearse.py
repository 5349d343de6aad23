"""Passes before the first step, and that there is no trace of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.pools import pool
from worldsize.errors import ConfigError, StepError
from worldsize.train.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    """Has what a pass leaves behind: running statistics, drop-out. Fails where it is told to."""

    fails: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 8) -> the same."""
        if self.fails == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: Tensor = torch.tanh(self.drop(self.norm(self.line(x))))
        if self.fails == "backward":
            found.register_hook(_no_memory)
        return found


def _no_memory(_grad: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


class Net(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        """One loss a sample."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean(1)


def trained(folder: Path, rehearsals: list[Any], **how: Any) -> tuple[list[bool], list[float]]:
    """Rehearse with the second block failing so on the ranks named, then train: whether memory sufficed, and the losses."""
    run = Run(folder, global_batch=8, micro_batch=2, duration="3st", precision="fp64", device="cpu", **how)
    model = run.model(Net)
    run.optimizer(lambda m: torch.optim.Adam(m.parameters(), 1e-2), model)

    def passes(turn: Any) -> None:
        for batch in turn.micro_batches:
            turn.backward(model(batch))

    answers = []
    for fails, ranks in rehearsals:
        second: Any = model.blocks[1]
        second.fails = fails if run.comm.rank in ranks else None
        answers.append(run.rehearse([X[:4], X[4:8]], passes))
        second.fails = None
    losses = []
    for step in run.steps(torch.utils.data.TensorDataset(X)):
        for (batch,) in step.micro_batches:
            step.backward(model(batch))
        step.update()
        losses.append(float(step.loss))
    return answers, losses


def with_older_torch(folder: Path, rehearsals: list[Any], **how: Any) -> tuple[list[bool], list[float]]:
    """The same where the wrapper cannot recover by itself."""
    kept = FSDPModule.__dict__["reset_iter_state"]
    del FSDPModule.reset_iter_state
    try:
        return trained(folder, rehearsals, **how)
    finally:
        FSDPModule.reset_iter_state = kept  # type: ignore[method-assign]


@pytest.mark.matrix
@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch is that old")
def test_fsdp_of_older_torch_recovers_too(tmp_path: Path) -> None:
    """After errors on the way forward and on the way back."""
    rehearsals = [("forward", (0, 1)), (None, ()), ("backward", (0, 1))]
    found = pool(2).run(with_older_torch, tmp_path / "tried", rehearsals, strategy="fsdp")
    plain = pool(2).run(trained, tmp_path / "plain", [], strategy="fsdp")
    assert [answers for answers, _ in found] == [[False, True, False]] * 2
    assert [losses for _, losses in found] == [losses for _, losses in plain]


@pytest.mark.parametrize(
    ("ranks", "how", "rehearsals"),
    [
        (1, {}, [(None, ()), ("forward", (0,)), ("backward", (0,))]),
        (2, {"strategy": "ddp"}, [(None, ()), ("forward", (1,)), ("backward", (0,))]),
        (2, {"strategy": "fsdp"}, [(None, ()), ("forward", (0, 1)), ("backward", (0, 1)), (None, ())]),
    ],
    ids=["single", "ddp", "fsdp"],
)
def test_a_rehearsal_leaves_no_trace(tmp_path: Path, ranks: int, how: dict[str, Any], rehearsals: list[Any]) -> None:
    """Whatever ends it, on whichever rank: memory counts as too small for all, and the training is the same to the bit."""
    found = pool(ranks).run(trained, tmp_path / "tried", rehearsals, **how)
    plain = pool(ranks).run(trained, tmp_path / "plain", [], **how)
    assert [answers for answers, _ in found] == [[fails is None for fails, _ in rehearsals]] * ranks
    assert [losses for _, losses in found] == [losses for _, losses in plain]


def states(folder: Path) -> list[bool]:
    """Whether each thing that a pass may move is what it was."""
    run = Run(folder, global_batch=8, micro_batch=2, duration="1st", device="cpu")
    model = run.model(Net)
    made = run.optimizer(lambda m: torch.optim.Adam(m.parameters()), model)

    def drawn(turn: Any) -> None:
        for batch in turn.micro_batches:
            random.random()
            np.random.rand()  # noqa: NPY002 - what programs draw from
            turn.backward(model(batch))

    def now() -> list[Any]:
        values = [value.clone() for value in model.state_dict().values()]
        generators = [str(random.getstate()), str(np.random.get_state()), torch.get_rng_state()]  # noqa: NPY002
        gradients = [value.grad is None for value in model.parameters()]
        return [
            *values,
            *generators,
            gradients,
            str(made.state_dict()),
            sorted(path.name for path in folder.iterdir()),
        ]

    before = now()
    run.rehearse([X[:2].float()], drawn)
    return [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, now(), strict=True)]


def test_nothing_has_moved(tmp_path: Path) -> None:
    """Parameters, buffers, generators, gradients, the optimizer, the folder."""
    assert all(pool(1).run(states, tmp_path / "run")[0])


def late(folder: Path) -> None:
    """A rehearsal behind the last step."""
    settling(folder, "1st", lambda run: run.rehearse([X[:2]], lambda _: None))


def test_it_comes_before_the_first_step(tmp_path: Path) -> None:
    """Later there is something to lose."""
    with pytest.raises(StepError, match="a rehearsal was made after the first step"):
        pool(1).run(late, tmp_path / "run")


def early(folder: Path) -> None:
    """A rehearsal of a pipeline."""
    run = Run(folder, global_batch=8, micro_batch=2, duration="1st", device="cpu", pp=2)
    run.model(Net)
    run.rehearse([X[:2].float()], lambda _: None)


def test_a_pipeline_has_none(tmp_path: Path) -> None:
    """Its passes cannot be undone: said, with what can."""
    with pytest.raises(ConfigError, match=r"Found: pipeline\. Do: use single, ddp, fsdp"):
        pool(2).run(early, tmp_path / "run")


def settling(folder: Path, steps: str, then: Callable[[Run], Any] = id) -> tuple[Any, Any]:
    """What an attempt knows of those before, and settles."""
    run = Run(folder, global_batch=8, micro_batch=2, duration=steps, device="cpu")
    model = run.model(Net)
    run.optimizer(lambda m: torch.optim.Adam(m.parameters()), model)
    begun = run.begun
    run.settle(found={"size": begun.get("settled", {}).get("found", {}).get("size", 0) + 1})
    for step in run.steps(torch.utils.data.TensorDataset(X.float())):
        for (batch,) in step.micro_batches:
            step.backward(model(batch))
        step.update()
    then(run)
    return begun.get("settled"), run.begun["settled"]


def test_what_is_settled_is_there_in_the_next_attempt(tmp_path: Path) -> None:
    """In run.json, beside what decides the training."""
    first = pool(1).run(settling, tmp_path / "run", "1st")[0]
    second = pool(1).run(settling, tmp_path / "run", "2st")[0]
    assert first == (None, {"found": {"size": 1}})
    assert second == ({"found": {"size": 1}}, {"found": {"size": 2}})
