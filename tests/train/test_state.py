"""What a checkpoint holds of a run, and what it refuses to be read into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.pools import pool
from tests.train import small
from worldsize.checkpoint import load, manifest
from worldsize.checkpoint.save import Checkpointer
from worldsize.errors import CheckpointError, ConfigError, StepError

if TYPE_CHECKING:
    from pathlib import Path


class Odd(small.Line):
    """State that is no tensor."""

    def get_extra_state(self) -> Any:
        """A text."""
        return "something"

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""


def teach(folder: Path, kind: str) -> list[str]:
    """A run whose parts depend on `kind`."""
    run = small.make(folder, duration="3st" if kind == "first" else "4st")
    model = run.model(Odd if kind == "odd" else nn.Linear(2, 1) if kind == "bare" else small.Line)
    if kind in ("teacher", "first"):
        teacher = run.model(small.Line, name="teacher", save="none")
        teacher.requires_grad_(False)  # noqa: FBT003 - torch's own signature
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9), model)
    if kind == "two":
        run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)
    if kind == "averaged":
        run.average(model, 0.9)
    for _step in small.steps(run, model if kind != "bare" else Squeezed(model)):
        pass
    return sorted(load.metadata(manifest.committed(folder)[-1]))


class Squeezed(nn.Module):
    """The last dimension left out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        found: torch.Tensor = self.inner(x).squeeze(1)
        return found


def test_names_say_what_they_are(tmp_path: Path) -> None:
    """Models, optimizer state by parameter; a model that is not to be saved is left out."""
    (names,) = pool(1).run(teach, tmp_path, "first")
    assert names == [
        "model/model/line.bias", "model/model/line.weight",
        "optim/0/model.line.bias/momentum_buffer", "optim/0/model.line.weight/momentum_buffer",
    ]  # fmt: skip


def test_only_an_update_changes_what_is_copied_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's own state and nothing else is left to be copied later, and each update says that it comes."""
    seen: list[Any] = []
    save = Checkpointer.save

    def spied(self: Checkpointer, tensors: Any, *args: Any, later: Any = (), **named: Any) -> None:
        seen.append((sorted(set(tensors) - set(later)), sorted(later)))
        save(self, tensors, *args, later=later, **named)

    monkeypatch.setattr(Checkpointer, "save", spied)
    monkeypatch.setattr(Checkpointer, "hold", lambda _: seen.append("hold"))
    run = small.make(tmp_path, saving=ws.Saving(every="2st"), duration="3st")
    model, optimizer = small.parts(run)
    optimizer.register_step_pre_hook(lambda *_: seen.append("update"))
    for _step in small.steps(run, model):
        pass
    weights = ["model/model/line.bias", "model/model/line.weight"]
    own = ["optim/0/model.line.bias/momentum_buffer", "optim/0/model.line.weight/momentum_buffer"]
    update = ["hold", "update"]
    assert seen == [*update, *update, (weights, own), *update, (sorted(weights + own), [])]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("two", r"optimizers are not those.*now \['0', '1'\], before \['0'\]"),
        ("averaged", "average"),
        ("bare", "weight"),
    ],
)
def test_other_parts_than_the_checkpoint_has_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    """B059: nothing is left at random, nothing is dropped in silence."""
    pool(1).run(teach, tmp_path, "first")
    with pytest.raises(CheckpointError, match=words):
        pool(1).run(teach, tmp_path, kind)


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """B058: it would need a pickle."""
    with pytest.raises(ConfigError, match=r"model 'model' has state that is no tensor.*_extra_state.*run.keep"):
        pool(1).run(teach, tmp_path, "odd")


def warm(folder: Path, source: Path, **how: Any) -> list[Any]:
    """Begin with the weights of another run, on shards too."""
    run = small.make(folder, strategy="fsdp", duration="1st")
    model = run.model(small.Line)
    left = run.warm_start(model, source, **how)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.0), model)
    for _step in small.steps(run, model):
        pass
    return [left, {name: value.tolist() for name, value in run.whole(model).items()}]


def test_a_warm_start_takes_weights_only(tmp_path: Path) -> None:
    """From a checkpoint of another layout; the run itself begins at its first step."""
    pool(1).run(teach, tmp_path / "a", "first")
    path = manifest.committed(tmp_path / "a")[-1]
    for left, weights in pool(2).run(warm, tmp_path / "b", path):
        assert left == []
        found = {name: torch.empty(fact.shape, dtype=fact.dtype) for name, fact in load.metadata(path).items()}
        from worldsize.runtime.comm import Alone

        load.load(path, found, Alone())
        assert weights == {name: found[f"model/model/{name}"].tolist() for name in weights}
    assert manifest.read(manifest.committed(tmp_path / "b")[-1]).step == 1


def test_a_warm_start_with_other_names_is_refused(tmp_path: Path) -> None:
    """With counts and examples; or told what stayed as it was."""
    torch.save({"line.weight": torch.ones(1, 2), "head": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"1 missing.*line.bias.*1 unexpected.*head"):
        pool(2).run(warm, tmp_path / "a", tmp_path / "weights.pt")
    for left, weights in pool(2).run(warm, tmp_path / "b", tmp_path / "weights.pt", strict=False):
        assert left == ["line.bias"]
        assert weights["line.weight"] == [[1.0, 1.0]]


def stranger(folder: Path, what: str) -> None:
    """A model or an optimizer that is not the run's, or a name that is taken."""
    run = small.make(folder)
    small.parts(run)
    if what == "model":
        run.average(small.Line(), 0.9)
    elif what == "name":
        run.model(small.Line)
    else:
        run.model(small.Line, name="other", wrapp=True)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("model", StepError, "Line is not a model of this run"),
        ("name", StepError, "two models are named 'model'"),
        ("option", ConfigError, r"unknown strategy option \['wrapp'\]"),
    ],
)
def test_strangers_are_refused(tmp_path: Path, what: str, error: type[Exception], words: str) -> None:
    """By name."""
    with pytest.raises(error, match=words):
        pool(1).run(stranger, tmp_path, what)


def quiet(folder: Path) -> None:
    """Saves often, and says nothing twice."""
    small.train(folder, saving=ws.Saving(every="1st", keep_last=1))


def test_metrics_have_every_step_once(tmp_path: Path) -> None:
    """Loss, rate, samples and epoch."""
    pool(2).run(quiet, tmp_path)
    assert list(small.numbers(tmp_path, "loss")) == list(range(6))
    assert list(small.numbers(tmp_path, "samples").values()) == [8, 16, 20, 28, 36, 40]
    assert list(small.numbers(tmp_path, "epoch").values()) == [0, 0, 0, 1, 1, 1]
    assert set(small.numbers(tmp_path, "lr").values()) == {0.1}
