from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.checkpoint.states import path_of, same, save_once
from worldsize.checkpoint.manifest import TRAIN
from worldsize.checkpoint.weights import INITIAL, initial, read_weights, write_weights
from worldsize.errors import CheckpointError, MissingExtraError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path


def net() -> nn.Module:
    """A model with an attribute that is called like a wrapper's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3))
    model.add_module("module", nn.Linear(3, 1))
    return model


STATE = {name: tensor.clone() for name, tensor in net().state_dict().items()}


def before(prefix: str, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The weights with something before every name."""
    return {prefix + name: tensor for name, tensor in (state or STATE).items()}


def test_ours(tmp_path: Path) -> None:
    """A checkpoint or a run folder of ours gives the weights of its model and nothing else."""
    tensors = before("model/") | {"optim/0.weight/exp_avg": torch.ones(3, 2)}
    save_once(tmp_path, Alone(), tensors, 4)
    assert same(read_weights(path_of(tmp_path, 4)), STATE)
    assert same(read_weights(tmp_path), STATE)


def test_ours_damaged(tmp_path: Path) -> None:
    """A damaged checkpoint of ours is not a source of weights."""
    save_once(tmp_path, Alone(), before("model/"), 4)
    (path_of(tmp_path, 4) / TRAIN).write_text("x")
    with pytest.raises(CheckpointError, match=TRAIN):
        read_weights(path_of(tmp_path, 4))


@pytest.mark.parametrize(
    "wrapped",
    [
        STATE,
        {"model": STATE, "optimizer": {"lr": 1.0}, "epoch": 3},
        {"model_state_dict": before("module.")},
        {"MODEL_STATE": STATE, "EPOCHS_RUN": 3},
        before("module._orig_mod."),
        before("_orig_mod.module."),
        {"state_dict": before("net."), "pytorch-lightning_version": "2.6.6", "epoch": 1},
        {"state_dict": before("model._orig_mod."), "pytorch-lightning_version": "2.6.6"},
        {name.replace("0.", "0._checkpoint_wrapped_module."): tensor for name, tensor in STATE.items()},
    ],
)
def test_torch_files(tmp_path: Path, wrapped: Any) -> None:
    """B059: whatever wrappers stood around the model when it was saved, its bare names come out, `module` included."""
    torch.save(wrapped, tmp_path / "x.ckpt")
    assert same(read_weights(tmp_path / "x.ckpt", names=list(STATE)), STATE)


def test_without_names_nothing_is_guessed(tmp_path: Path) -> None:
    """Names stay as they are where the model is not known; a prefix chooses and goes."""
    torch.save({"state_dict": before("net.") | {"loss.w": torch.ones(2)}}, tmp_path / "x.ckpt")
    assert "net.0.weight" in read_weights(tmp_path / "x.ckpt")
    assert same(read_weights(tmp_path / "x.ckpt", prefix="net."), STATE)
    with pytest.raises(CheckpointError, match=r"begins with 'other\.'"):
        read_weights(tmp_path / "x.ckpt", prefix="other.")


def test_other_weights_are_counted(tmp_path: Path) -> None:
    """Weights of another model are refused with counts, never loaded in part."""
    torch.save({"0.weight": torch.ones(3, 2), "other": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"3 missing .* 1 unexpected \(other\), 1 fit"):
        read_weights(tmp_path / "x.pt", names=list(STATE))


class Opened:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return self.path.touch, ()


def test_nothing_is_unpickled_without_trust(tmp_path: Path) -> None:
    """B058: a file that needs unpickling is refused without running anything; the error says how to allow it."""
    torch.save({"state_dict": STATE, "x": Opened(tmp_path / "trace")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="--trust"):
        read_weights(tmp_path / "x.pt")
    assert not (tmp_path / "trace").exists()
    assert same(read_weights(tmp_path / "x.pt", trust=True), STATE)
    assert (tmp_path / "trace").exists()


def test_hyperparameters_need_trust(tmp_path: Path) -> None:
    """A checkpoint with an argparse.Namespace inside is read under trust."""
    torch.save({"state_dict": STATE, "hparams": argparse.Namespace(lr=1)}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"Found: argparse\.Namespace"):
        read_weights(tmp_path / "x.ckpt")
    assert same(read_weights(tmp_path / "x.ckpt", trust=True), STATE)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_accelerate_folder(tmp_path: Path, name: str) -> None:
    """A folder that accelerate or transformers wrote."""
    save_file(STATE, tmp_path / name) if name.endswith("s") else torch.save(STATE, tmp_path / name)
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    assert same(read_weights(tmp_path), STATE)


def test_sharded_safetensors(tmp_path: Path) -> None:
    """Weights in several files with an index."""
    parts = {name: f"model-{index}.safetensors" for index, name in enumerate(STATE)}
    for name, file in parts.items():
        save_file({name: STATE[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert same(read_weights(tmp_path), STATE)


def test_an_index_cannot_reach_outside(tmp_path: Path) -> None:
    """An index that names files elsewhere is refused."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"[]"])
def test_what_is_no_checkpoint_is_told(tmp_path: Path, name: str, content: bytes) -> None:
    """Anything else is one line with the path, not a traceback."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_weights(tmp_path / name)


def test_missing_and_empty(tmp_path: Path) -> None:
    """A path that is not there and a folder with nothing in it."""
    with pytest.raises(CheckpointError, match="No such file"):
        read_weights(tmp_path / "nothing.pt")
    with pytest.raises(CheckpointError, match="an empty folder"):
        read_weights(tmp_path)


def test_safetensors_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error says what to install."""
    save_file(STATE, tmp_path / "x.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(MissingExtraError, match=r"worldsize\[safetensors\]"):
        read_weights(tmp_path / "x.safetensors")


def test_into_a_file(tmp_path: Path) -> None:
    """Weights go into files that need no unpickling, tied and transposed ones too."""
    weights = STATE | {"tied": STATE["0.weight"], "t": torch.randn(2, 3).t()}
    assert same(load_file(write_weights(weights, tmp_path / "x.safetensors")), weights)
    assert same(torch.load(write_weights(weights, tmp_path / "x.pt"), weights_only=True), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.pt", "x.safetensors"]


def test_into_a_run(tmp_path: Path) -> None:
    """A new run folder takes weights for its first start; one that has trained does not."""
    assert initial(tmp_path / "new") is None
    write_weights(STATE, tmp_path / "new")
    assert initial(tmp_path / "new") == tmp_path / "new" / INITIAL
    assert same(read_weights(tmp_path / "new" / INITIAL, names=list(STATE)), STATE)
    save_once(tmp_path / "old", Alone(), before("model/"), 4)
    with pytest.raises(CheckpointError, match="has trained already"):
        write_weights(STATE, tmp_path / "old")
