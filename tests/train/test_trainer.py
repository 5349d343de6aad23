"""Give the parts, and a loop is written for you."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.integration.program import Net, samples
from tests.pools import pool
from worldsize.errors import ConfigError, StepError
from worldsize.runtime.comm import Alone
from worldsize.train.criterion import Criterion, accuracy
from worldsize.train.trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.train.trainer import StepInfo


def fit(folder: Path, strategy: str, **more: Any) -> tuple[dict[str, Any], list[int]]:
    """The README's beginner, in small."""
    seen: list[int] = []

    def note(info: StepInfo) -> None:
        seen.append(info.step.index)

    given: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "duration": "3ep", "average": 0.9, **more}
    made = Trainer(
        model=Net, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
        data=samples(), eval_data=samples(61), metrics={"acc": ws.accuracy}, global_batch=48, micro_batch=4,
        run_dir=folder, strategy=strategy, precision="fp64", device="cpu", **given,
    )  # fmt: skip
    return made.hook(note, every=2).fit(), seen


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 3), ("fsdp", 2)])
def test_the_result_does_not_depend_on_the_layout(tmp_path: Path, layout: str, ranks: int) -> None:
    """Scores of a model that learns; hooks in the same steps on every rank."""
    ((alone, seen),) = pool(1).run(fit, tmp_path / "a", "single")
    assert alone["scores"]["acc"] > 0.5
    assert seen == list(range(1, 15, 2))
    for found, steps in pool(ranks).run(fit, tmp_path / "b", layout):
        assert found["scores"] == pytest.approx(alone["scores"], rel=1e-9)
        assert steps == seen
        assert (found["step"], found["best"]["mode"]) == (15, "min")


def test_a_mean_by_a_function_weighs_like_the_module(tmp_path: Path) -> None:
    """The probe finds out that it is a mean over samples."""
    ((one, _),) = pool(1).run(fit, tmp_path / "a", "single")
    ((two, _),) = pool(1).run(fit, tmp_path / "b", "single", loss=nn.functional.cross_entropy)
    assert two["scores"] == pytest.approx(one["scores"], rel=1e-9)


def test_patience_ends_the_run(tmp_path: Path) -> None:
    """A score that cannot get better: accuracy of the best kind is reached never twice."""
    ((found, _),) = pool(1).run(fit, tmp_path, "single", best=("loss", "max"), patience=1)
    assert found["done"] == "no better loss in 1 evaluations"
    assert found["step"] < 15


def test_wrong_parts_are_refused(tmp_path: Path) -> None:
    """Before anything is done."""
    with pytest.raises(ConfigError, match="eval_every='3sa'"):
        pool(1).run(fit, tmp_path, "single", eval_every="3sa")


OUTPUT = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]], requires_grad=True)
TARGET = torch.tensor([0, 1, -100])


def test_cross_entropy_counts_labels_with_their_weight() -> None:
    """As torch's own mean does: ignored ones not at all, classes by their weight."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    said = Criterion(loss, Alone()).arguments(OUTPUT, TARGET)
    assert said["sum_over"] == 4.0
    assert float(said["losses"].detach()) / 4.0 == pytest.approx(float(loss(OUTPUT, TARGET).detach()))


def test_a_loss_per_sample_is_taken_as_it_is() -> None:
    """Also of several numbers a sample, whose mean counts."""
    criterion = Criterion(nn.MSELoss(), Alone())
    assert criterion.arguments(OUTPUT, torch.zeros(3, 2))["losses"].shape == (3,)


def test_a_loss_that_does_not_separate_is_refused() -> None:
    """Its weight in a step cannot be known."""
    criterion = Criterion(lambda output, _: output.std(), Alone())
    with pytest.raises(StepError, match="neither a mean nor a sum over samples"):
        criterion.arguments(OUTPUT, TARGET)


def test_accuracy_is_a_share_for_each_sample() -> None:
    """Over everything behind the first two dimensions."""
    assert accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).tolist() == [1.0, 0.0]
    dense = torch.zeros(1, 2, 4)
    dense[:, 1, :3] = 1
    assert accuracy(dense, torch.ones(1, 4, dtype=torch.long)).tolist() == [0.75]
