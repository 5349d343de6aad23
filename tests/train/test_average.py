"""The moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.integration.program import Net, may_stop
from tests.pools import pool
from tests.train import small
from worldsize.errors import ConfigError
from worldsize.runtime import signals

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def both(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Ours and torch's, over one training with batch normalisation; and whether the block put the weights back."""
    run = small.make(folder, micro_batch=4)
    model = run.model(Net)
    run.optimizer(lambda m: torch.optim.Adam(m.parameters(), 1e-2), model)
    ours = run.average(model, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # its first call copies
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    for step in run.steps(torch.utils.data.TensorDataset(x, x.abs().argmax(1) % 3)):
        for inputs, target in step.micro_batches:
            step.backward(torch.nn.functional.cross_entropy(model(inputs), target, reduction="none"))
        step.update()
        theirs.update_parameters(model)
    before = run.whole(model)
    with ours.applied():
        with ours.applied():
            pass
        averaged = run.whole(model)
    after = run.whole(model)
    back = all(torch.equal(before[name], after[name]) for name in before)
    expected = {name: value.detach() for name, value in theirs.module.state_dict().items()}
    return averaged, {**expected, **{n: before[n] for n in before if "running" in n or "tracked" in n}}, back


def test_it_is_what_torch_averages(tmp_path: Path) -> None:
    """Parameters as AveragedModel's EMA from the first weights on; running statistics are copied."""
    ours, theirs, back = pool(1).run(both, tmp_path)[0]
    assert back
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14)


def wrong(folder: Path, decay: float) -> None:
    """An average with this decay."""
    run = small.make(folder)
    run.average(run.model(small.Line), decay)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 2.0])
def test_a_decay_out_of_range_is_refused(tmp_path: Path, decay: float) -> None:
    """It would keep nothing, or never move."""
    with pytest.raises(ConfigError, match="between 0 and 1"):
        pool(1).run(wrong, tmp_path, decay)


def stopped(folder: Path, stops: bool) -> list[dict[str, Tensor]]:
    """The weights in the end; with a stop while the average is evaluated after the third step, from the next attempt."""
    for attempt in range(2 if stops else 1):
        signals.forget()  # as in a new process
        run = small.make(folder)
        model, _ = small.parts(run)
        average = run.average(model, 0.9)
        with may_stop():
            for step in small.steps(run, model):
                if step.index == 2:
                    if stops and attempt == 0:
                        small.stop()
                    with average.applied():
                        run.evaluate(lambda batch: {"loss": small.errors(model, batch)}, small.data(7))  # noqa: B023
        run.close()
    return [{name: value.clone() for name, value in run.whole(model).items()}, dict(average.state())]


def test_a_stop_while_it_is_applied_saves_the_model(tmp_path: Path) -> None:
    """And not the average as the model: the next attempt goes on as if nothing had been."""
    wanted, found = (pool(1).run(stopped, tmp_path / str(stops), stops)[0] for stops in (False, True))
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=0)
