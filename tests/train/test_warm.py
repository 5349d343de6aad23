"""Facts about beginning with weights from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from worldsize.errors import CheckpointError
from worldsize.runtime import session
from worldsize.strategies.base import Setting
from worldsize.strategies.batchnorm import RunningStatistics
from worldsize.strategies.precision import Precision
from worldsize.strategies.single import Single
from worldsize.train.parts import Placed
from worldsize.train.warm import fill, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    yield
    session.close()


def _placed(model: nn.Module) -> Placed:
    strategy = Single(Setting(session.session("cpu"), Precision.of("fp32")))
    return Placed("net", model, strategy, RunningStatistics(model, strategy))


def _saved(folder: Path, prefix: str = "") -> tuple[Path, nn.Linear]:
    model = nn.Linear(3, 2)
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, folder / "w.pt")
    return folder / "w.pt", model


@pytest.mark.parametrize("prefix", ["", "module.", "net/"])
def test_weights_come_in_under_bare_names(tmp_path: Path, prefix: str) -> None:
    """Names of a wrapper, and of a model in a checkpoint of ours, are taken off (B059)."""
    path, theirs = _saved(tmp_path, prefix)
    mine = nn.Linear(3, 2)
    assert fill(_placed(mine), read(path, "net", mine, strict=True, trust=False)) == []
    assert torch.equal(mine.weight, theirs.weight)


def test_names_of_another_model_are_refused(tmp_path: Path) -> None:
    """Strict: what does not fit is told with counts."""
    path, _ = _saved(tmp_path)
    other = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match="are not those of this model"):
        read(path, "net", nn.ModuleDict({"a": other, "b": nn.Linear(1, 1)}), strict=True, trust=False)


def test_without_strict_what_fits_is_taken(tmp_path: Path) -> None:
    """Not strict: names that are missing keep their values and are returned."""
    path, theirs = _saved(tmp_path)
    mine = nn.Linear(3, 2)
    mine.register_buffer("extra", torch.ones(1))
    assert fill(_placed(mine), read(path, "net", mine, strict=False, trust=False), strict=False) == ["extra"]
    assert torch.equal(mine.bias, theirs.bias)


def test_another_shape_is_named() -> None:
    """A tensor of the right name and the wrong shape is refused by name."""
    with pytest.raises(CheckpointError, match="weight: shapes differ"):
        fill(_placed(nn.Linear(3, 2)), nn.Linear(2, 2).state_dict())
