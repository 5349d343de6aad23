"""A run that goes on with another optimizer than its checkpoint was written with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from tests.pools import pool
from tests.train import small
from worldsize.checkpoint import load, manifest
from worldsize.errors import CheckpointError
from worldsize.runtime.sharded import is_sharded
from worldsize.track.jsonl import read
from worldsize.train.optim import NamedOptimizer, Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer


class Moved(torch.optim.SGD):
    """A program's own."""


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 2e-2),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), 2e-2, amsgrad=True),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), 1e-2),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "faster": lambda m: torch.optim.SGD(m.parameters(), 0.4, momentum=0.5),
    "Moved": lambda m: Moved(m.parameters(), 0.1, momentum=0.9),
    "split": lambda m: torch.optim.SGD([{"params": [value]} for value in m.parameters()], 0.1, momentum=0.9),
}
LAYOUTS = {"single": 1, "fsdp": 2}
PAIRS = [("AdamW", "SGD"), ("SGD", "AdamW"), ("AdamW", "Adam"), ("Adam", "AdamW"), ("Adam", "Adamax")]


def train(folder: Path, kind: str, until: str, strategy: str, decay: float = 1.0, **settings: Any) -> dict[str, Any]:
    """Some steps: losses, the rate of each, settings and state at the end."""
    run = small.make(folder, strategy=strategy, duration=until, **settings)
    model = run.model(small.Line)
    optimizer = run.optimizer(MAKERS[kind], model)
    run.schedule(optimizer, lambda o: lrs.LambdaLR(o, lambda step: decay**step))
    losses, rates = {}, []
    for step in small.steps(run, model):
        losses[step.index] = float(step.loss)
        rates.append(optimizer.param_groups[0]["lr"])
    (group, *_), (state, *_) = optimizer.param_groups, optimizer.state.values()
    return {
        "losses": losses, "rates": rates, "group": {key: group[key] for key in group if key != "params"},
        "state": {key: value.full_tensor() if is_sharded(value) else value for key, value in state.items()},
    }  # fmt: skip


def change(folder: Path, strategy: str, first: str, second: str, **settings: Any) -> dict[str, Any]:
    """Two steps with one optimizer, then up to the fourth with another."""
    ranks = pool(LAYOUTS[strategy])
    ranks.run(train, folder, first, "2st", strategy)
    return ranks.run(train, folder, second, "4st", strategy, **settings)[0]


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_another_class_is_refused(tmp_path: Path, strategy: str, first: str, second: str) -> None:
    """With the names of both, and what to say where it is wanted."""
    words = rf"optimizer '0' is not the one.*now torch\.\S+\.{second}, before torch\.\S+\.{first}\. .*accept=\('optimizer',\)"
    with pytest.raises(CheckpointError, match=words):
        change(tmp_path, strategy, first, second)


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_another_class_that_is_accepted_goes_on(tmp_path: Path, strategy: str, first: str, second: str) -> None:
    """From the next step, with the settings of the program."""
    found = change(tmp_path, strategy, first, second, accept=("optimizer",))
    made = MAKERS[second](small.Line()).param_groups[0]
    assert list(found["losses"]) == [2, 3]
    assert {key: found["group"][key] for key in made if key != "params"} == {
        key: value for key, value in made.items() if key != "params"
    }


@pytest.mark.parametrize("pair", PAIRS)
def test_an_accepted_change_is_the_same_curve_on_shards(tmp_path: Path, pair: tuple[str, str]) -> None:
    """Whatever lies where, each starts from the same."""
    whole, shards = (change(tmp_path / name, name, *pair, accept=("optimizer",)) for name in LAYOUTS)
    assert shards["losses"] == pytest.approx(whole["losses"], rel=1e-10)


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_a_state_that_does_not_fit_begins_anew(tmp_path: Path, strategy: str) -> None:
    """It knows of the two steps that it made itself."""
    found = change(tmp_path, strategy, "SGD", "AdamW", accept=("optimizer",))
    assert found["state"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(found["state"]["step"]) == 2


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize(("second", "steps"), [("Adam", 4), ("amsgrad", 2)])
def test_a_state_that_fits_goes_on(tmp_path: Path, strategy: str, second: str, steps: int) -> None:
    """AdamW's is Adam's, unless one of them keeps a tensor more."""
    found = change(tmp_path, strategy, "AdamW", second, accept=("optimizer",))
    assert float(found["state"]["step"]) == steps


class Two(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.flat = nn.Linear(2, 3), nn.Linear(3, 1), nn.Flatten(0)

    def forward(self, x: torch.Tensor) -> Any:
        """One number a sample."""
        return self.flat(self.second(self.first(x)))


class Still(Two):
    """Nothing is trained in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(requires_grad=False)


def staged(
    folder: Path, kind: str, until: str, pp: int, build: type[nn.Module] = Two, **settings: Any
) -> dict[int, float]:
    """Losses of some steps in as many stages."""
    run = small.make(folder, duration=until, pp=pp, **settings)
    model = run.model(build)
    run.optimizer(MAKERS[kind], model)
    return {step.index: float(step.loss) for step in small.steps(run, model)}


@pytest.mark.parametrize("build", [Two, Still])
@pytest.mark.parametrize("second", ["Adam", "SGD"])
def test_ranks_of_a_pipeline_change_together(tmp_path: Path, second: str, build: type[nn.Module]) -> None:
    """Each of them knows its own parameters only; what another optimizer keeps is left where it is."""
    found = []
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        pool(stages).run(staged, folder, "AdamW", "2st", stages, build)
        with pytest.raises(CheckpointError, match=r"before torch\.optim\.adamw\.AdamW"):
            pool(stages).run(staged, folder, second, "4st", stages, build)
        found.append(pool(stages).run(staged, folder, second, "4st", stages, build, accept=("optimizer",))[0])
    assert found[1] == pytest.approx(found[0], rel=1e-10)


def test_an_accepted_change_is_said(tmp_path: Path) -> None:
    """As any other one, with what becomes of the state."""
    change(tmp_path, "single", "AdamW", "SGD", accept=("optimizer",))
    (said,) = [line["what"] for line in read(tmp_path / "events.jsonl") if "optimizer" in line.get("what", "")]
    assert said.endswith("before torch.optim.adamw.AdamW), accepted: its state begins anew")


def test_an_accepted_change_is_one_once(tmp_path: Path) -> None:
    """The next checkpoint is of the new optimizer, and is gone on from as ever."""
    change(tmp_path, "single", "AdamW", "SGD", accept=("optimizer",))
    assert list(train(tmp_path, "SGD", "5st", "single")["losses"]) == [4]


def test_a_schedule_goes_on_from_the_new_rate(tmp_path: Path) -> None:
    """At its place: halved at each step, of the program's rate and not of the other optimizer's."""
    train(tmp_path, "SGD", "2st", "single", 0.5)
    found = train(tmp_path, "AdamW", "4st", "single", 0.5, accept=("optimizer",))
    assert found["rates"] == pytest.approx([1e-2 / 8, 1e-2 / 16])


def test_settings_of_the_same_class_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Rates are a schedule's, and the run is the same one."""
    found = change(tmp_path, "single", "SGD", "faster")
    assert (found["group"]["lr"], found["group"]["momentum"]) == (0.1, 0.9)


def test_other_groups_may_be_accepted(tmp_path: Path) -> None:
    """Their state begins anew; without a word they are refused, with what to say."""
    with pytest.raises(CheckpointError, match=r"groups of \[1, 1\] now, of \[2\] before.*accept=\('optimizer',\)"):
        change(tmp_path, "single", "SGD", "split")
    assert list(train(tmp_path, "split", "4st", "single", accept=("optimizer",))["losses"]) == [2, 3]


def test_the_checkpoint_names_the_class(tmp_path: Path) -> None:
    """Beside what can be set of it."""
    train(tmp_path, "SGD", "2st", "single")
    by = load.read_train(manifest.committed(tmp_path)[-1])["optim"]["0"]["by"]
    assert by["class"] == "torch.optim.sgd.SGD"
    assert {"lr", "momentum", "nesterov"} <= set(by["keys"])


def saved(kind: str) -> Skeleton:
    """Of an optimizer that made no step."""
    model = small.Line()
    return NamedOptimizer("0", MAKERS[kind](model), {"model": model}).skeleton()


def misfit(kind: str, skeleton: Skeleton) -> str | None:
    """What is said of it where this one is there now."""
    model = small.Line()
    found = NamedOptimizer("0", MAKERS[kind](model), {"model": model}).misfit(skeleton)
    return None if found is None else str(found)


def unsigned(kind: str) -> Skeleton:
    """As it was written before there was a record."""
    return {key: value for key, value in saved(kind).items() if key != "by"}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_checkpoint_without_the_record_still_loads(kind: str) -> None:
    """Into what wrote it."""
    assert misfit(kind, unsigned(kind)) is None


@pytest.mark.parametrize(
    ("first", "second"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("Adam", "Adamax"), ("Adamax", "Adam")]
)
def test_without_the_record_settings_tell_the_class(first: str, second: str) -> None:
    """Where one has some that the other has not."""
    words = misfit(second, unsigned(first))
    assert words is not None
    assert f".{second}, before one that knows" in words


def test_a_class_of_the_program_may_move() -> None:
    """What is `__main__` in one start is a module in the next."""
    skeleton = saved("Moved")
    skeleton["by"]["class"] = "__main__.Moved"
    assert misfit("Moved", skeleton) is None


def test_a_class_that_is_named_like_one_of_torch_is_another() -> None:
    """It may do what it wants."""
    skeleton = saved("SGD")
    skeleton["by"]["class"] = "__main__.SGD"
    assert "before __main__.SGD" in (misfit("SGD", skeleton) or "")
