from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoint.states import facts, odd, path_of, save_once
from tests.checkpoint.trained import trained
from worldsize.checkpoint.difference import Difference, compare
from worldsize.checkpoint.opened import Opened
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def saved(folder: Path, tensors: dict[str, Tensor]) -> Opened:
    """A checkpoint of these tensors."""
    save_once(folder, Alone(), tensors, 1)
    return Opened(path_of(folder, 1))


def differing(tmp_path: Path, a: Tensor, b: Tensor, **allowed: float) -> Difference:
    """What differs between two checkpoints of one tensor."""
    return compare(saved(tmp_path / "a", {"model/w": a}), saved(tmp_path / "b", {"model/w": b}), **allowed)


def test_a_checkpoint_is_itself(tmp_path: Path) -> None:
    """Tensors of every kind are equal to themselves."""
    one = saved(tmp_path, odd())
    found = compare(one, one)
    assert not found
    assert found.equal == len(odd())


def test_the_largest_differences_come_first(tmp_path: Path) -> None:
    """Each tensor with its largest absolute and relative difference and how many values differ."""
    a = {
        "model/small": torch.tensor([1.0, 2.0]),
        "model/large": torch.tensor([1.0, 8.0, 5.0]),
        "model/same": torch.ones(3),
    }
    b = {
        "model/small": torch.tensor([1.5, 2.0]),
        "model/large": torch.tensor([1.0, 4.0, 4.0]),
        "model/same": torch.ones(3),
    }
    found = compare(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    assert [(d.name, d.absolute, d.values) for d in found.deltas] == [
        ("model/large", 4.0, 2),
        ("model/small", 0.5, 1),
    ]
    assert [d.relative for d in found.deltas] == pytest.approx([0.5, 1 / 3])
    assert found.equal == 1


def test_what_only_one_has(tmp_path: Path) -> None:
    """Names of either side."""
    found = compare(
        saved(tmp_path / "a", {"model/a": torch.ones(1), "model/x": torch.ones(1)}),
        saved(tmp_path / "b", {"model/b": torch.ones(1), "model/x": torch.ones(1)}),
    )
    assert (found.only_a, found.only_b, found.deltas) == (["model/a"], ["model/b"], [])
    assert found


def test_what_is_allowed(tmp_path: Path) -> None:
    """Within atol + rtol times the larger value nothing differs; beyond, the values that do are counted."""
    a, b = torch.tensor([100.0, 1.0, 0.0]), torch.tensor([101.0, 1.0, 0.001])
    assert not differing(tmp_path / "1", a, b, rtol=0.01, atol=0.001)
    assert differing(tmp_path / "2", a, b, rtol=0.01).deltas[0].values == 1
    assert differing(tmp_path / "3", a, b, atol=0.5).deltas[0].values == 1


@pytest.mark.parametrize(
    ("a", "b", "absolute"),
    [
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), None),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), None),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 0.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), 2.0),
        (torch.empty(0, 3), torch.empty(0, 3), None),
    ],
)
def test_values_of_every_kind(tmp_path: Path, a: Tensor, b: Tensor, absolute: float | None) -> None:
    """NaNs are equal to each other and infinitely far from numbers; large integers are not rounded away."""
    found = differing(tmp_path, a, b, rtol=0.1)
    assert [delta.absolute for delta in found.deltas] == ([] if absolute is None else [absolute])


def test_another_shape_or_dtype(tmp_path: Path) -> None:
    """Both are told; of another dtype the values are compared all the same."""
    shape = differing(tmp_path / "1", torch.ones(2, 3), torch.ones(3, 2), atol=9.0).deltas[0]
    assert shape.kinds == ("[2, 3] float32", "[3, 2] float32")
    dtype = differing(tmp_path / "2", torch.tensor([0.1]), torch.tensor([0.1]).bfloat16(), atol=9.0).deltas[0]
    assert dtype.kinds == ("[1] float32", "[1] bfloat16")
    assert 0 < dtype.absolute < 1e-3


def test_pieces_larger_than_what_is_compared_at_once(tmp_path: Path) -> None:
    """A difference in the last of millions of values is found."""
    a = torch.zeros((1 << 21) + 3)
    b = a.clone()
    b[-1] = 2.0
    (delta,) = differing(tmp_path, a, b).deltas
    assert (delta.absolute, delta.relative, delta.values) == (2.0, 1.0, 1)


def train_of(step: int, lr: float) -> dict[str, Any]:
    """What a training keeps besides tensors."""
    slots = {"m.w": {"pairs": [["step", step], ["exp_avg", {"tensor": ["m.w/exp_avg", [1], "float32", "cpu"]}]]}}
    return {
        "progress": {"step": step, "best": {}},
        "optim": {"0": {"groups": [{"lr": lr, "betas": [0.9, lr], "params": ["m.w"]}], "slots": slots}},
    }


def test_progress_and_hyperparameters(tmp_path: Path) -> None:
    """Each plain value by its path, with both values; floats within what is allowed."""
    from tests.checkpoint.states import checkpointer

    opened = []
    for name, step, lr in (("a", 1, 0.1), ("b", 2, 0.2)):
        saver = checkpointer(tmp_path / name, Alone())
        saver.save({"model/w": torch.ones(1)}, train_of(step, lr), facts(step), wait=True)
        saver.close()
        opened.append(Opened(path_of(tmp_path / name, step)))
    found = compare(*opened)
    assert found.plain == [
        ("optim.0.groups[0].betas", [0.9, 0.1], [0.9, 0.2]),
        ("optim.0.groups[0].lr", 0.1, 0.2),
        ("optim.0.slots.m.w.step", 1, 2),
        ("progress.step", 1, 2),
    ]
    assert [path for path, *_ in compare(*opened, atol=0.2).plain] == ["optim.0.slots.m.w.step", "progress.step"]


def test_layouts_differ_by_rounding_only(tmp_path: Path) -> None:
    """What single, ddp and fsdp wrote of one training is equal within rounding; another schedule is not."""
    for strategy in ("single", "ddp", "fsdp"):
        trained(tmp_path / strategy, strategy, precision="fp64")
    trained(tmp_path / "other", "single", precision="fp64", lr=0.5)
    single, ddp, fsdp, other = (Opened(path_of(tmp_path / name, 4)) for name in ("single", "ddp", "fsdp", "other"))
    for one, two in ((single, ddp), (ddp, fsdp)):
        assert not compare(one, two, rtol=1e-9, atol=1e-9)
    found = compare(single, other, rtol=1e-9, atol=1e-9)
    assert "model/net/emb.weight" in [delta.name for delta in found.deltas]
    assert "optim.0.groups[0].lr" in [path for path, *_ in found.plain]
