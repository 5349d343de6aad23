"""Facts about beginning with weights from elsewhere."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from worldsize.errors import CheckpointError
from worldsize.runtime import session
from worldsize.runtime.comm import Alone
from worldsize.strategies.base import Setting
from worldsize.strategies.batchnorm import RunningStatistics
from worldsize.strategies.precision import Precision
from worldsize.strategies.single import Single
from worldsize.train.parts import Placed
from worldsize.train.warm import start

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    yield
    session.close()


def _placed(model: nn.Module) -> Placed:
    strategy = Single(Setting(session.session("cpu"), Precision.of("fp32")))
    return Placed("net", model, strategy, RunningStatistics(model, strategy))


def _saved(folder: Path, prefix: str = "", suffix: str = ".pt") -> tuple[Path, nn.Linear]:
    model, path = nn.Linear(3, 2), folder / f"w{suffix}"
    values = {prefix + name: value for name, value in model.state_dict().items()}
    if suffix == ".pt":
        torch.save(values, path)
    else:
        save_file(values, path)
    return path, model


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "net/"])
def test_weights_come_in_under_bare_names(tmp_path: Path, prefix: str, suffix: str) -> None:
    """Names of a wrapper, and of a model in a checkpoint of ours, are taken off (B059)."""
    path, theirs = _saved(tmp_path, prefix, suffix)
    mine = nn.Linear(3, 2)
    assert start(_placed(mine), path, Alone()) == []
    assert torch.equal(mine.weight, theirs.weight)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_converted(tmp_path: Path, low: torch.dtype) -> None:
    """Files of half the size are read into what is trained."""
    theirs = nn.Linear(3, 2).to(low)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    mine = nn.Linear(3, 2)
    start(_placed(mine), tmp_path / "w.safetensors", Alone())
    assert torch.equal(mine.weight, theirs.weight.float())


def test_a_tied_weight_is_read_for_both_names(tmp_path: Path) -> None:
    """Written once, as transformers does."""
    theirs = nn.Linear(3, 3, bias=False)
    save_file({"0.weight": theirs.weight.detach()}, tmp_path / "w.safetensors", metadata={"1.weight": "0.weight"})
    mine = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    start(_placed(mine), tmp_path / "w.safetensors", Alone())
    assert all(torch.equal(value, theirs.weight) for value in mine.parameters())


@pytest.mark.parametrize("kept", ["0.weight", "1.weight"])
def test_tied_weights_may_be_there_once(tmp_path: Path, kept: str) -> None:
    """Folders of transformers leave one of the names out."""
    theirs = nn.Linear(3, 3, bias=False)
    save_file({kept: theirs.weight.detach()}, tmp_path / "w.safetensors")
    mine = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    mine[1].weight = mine[0].weight
    start(_placed(mine), tmp_path / "w.safetensors", Alone())
    assert all(torch.equal(value, theirs.weight) for value in mine.parameters())


@given(st.binary(max_size=64), st.integers(0, 200))
def test_no_damage_of_a_file_is_a_traceback(junk: bytes, at: int) -> None:
    """Whatever stands in a safetensors file: its tensors, or our error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        save_file(nn.Linear(3, 2).state_dict(), path)
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
        try:
            start(_placed(nn.Linear(3, 2)), path, Alone())
        except CheckpointError as error:
            assert str(path) in str(error) or "shapes differ" in str(error)  # noqa: PT017 - either is right


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    """With what does not lie there."""
    path, _ = _saved(tmp_path, suffix=".safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="does not lie where it says"):
        start(_placed(nn.Linear(3, 2)), path, Alone())


def test_names_of_another_model_are_refused(tmp_path: Path) -> None:
    """Strict: what does not fit is told with counts."""
    path, _ = _saved(tmp_path)
    other = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match="are not those of this model"):
        start(_placed(nn.ModuleDict({"a": other, "b": nn.Linear(1, 1)})), path, Alone())


def test_without_strict_what_fits_is_taken(tmp_path: Path) -> None:
    """Not strict: names that are missing keep their values and are returned."""
    path, theirs = _saved(tmp_path)
    mine = nn.Linear(3, 2)
    mine.register_buffer("extra", torch.ones(1))
    assert start(_placed(mine), path, Alone(), strict=False) == ["extra"]
    assert torch.equal(mine.bias, theirs.bias)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_another_shape_is_named(tmp_path: Path, suffix: str) -> None:
    """A tensor of the right name and the wrong shape is refused by name."""
    path, _ = _saved(tmp_path, suffix=suffix)
    with pytest.raises(CheckpointError, match="weight: shapes differ"):
        start(_placed(nn.Linear(2, 2)), path, Alone())
