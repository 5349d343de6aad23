"""Adapters: one curve on every layout, nothing else moves, and transformers loads what comes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.recipes.llm import folders
from tests.recipes.llm.test_train import curve, same
from worldsize.checkpoint import address
from worldsize.checkpoint.opened import Opened
from worldsize.errors import ConfigError
from worldsize.recipes.llm import folder, generate
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.lora import Lora, adapt
from worldsize.recipes.llm.model import Decoder
from worldsize.recipes.llm.shape import read
from worldsize.recipes.llm.train import train

STEPS = 4


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model with biases, and the settings of all trainings."""
    place = tmp_path_factory.mktemp("lora")
    folders.folder(place / "model", "qwen2", num_hidden_layers=4)
    path = folders.lines(place / "data.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(40)))
    return {
        "init_ckpt": str(place / "model"), "data_path": str(path), "cache_dir": str(place / "cache"), "max_seq_len": 32,
        "global_batch": 4, "train_steps": STEPS, "precision": "fp64", "lr": "1e-2", "device": "cpu", "lora_rank": 4,
        "lora_alpha": 12,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run in one process lies."""
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture(scope="module")
def alone(given: dict[str, Any], run: Path) -> dict[int, tuple[float, float]]:
    """Its curve."""
    return curve(run, given, "single:1")


@pytest.mark.parametrize(
    "layout",
    ["fsdp:2", "tp2:2", *(pytest.param(each, marks=pytest.mark.matrix) for each in (
        "ddp:2", "pp2:2", "zero1:2", "zero3:2", "fsdp+tp2+pp2:8"))],
)  # fmt: skip
def test_every_layout_has_one_curve(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]], layout: str
) -> None:
    """In float64: what is frozen has no gradient and no state anywhere."""
    same(curve(tmp_path, given, layout), alone)


def test_it_goes_on_elsewhere(tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]]) -> None:
    """From two shards to one process."""
    found = curve(tmp_path, given, "fsdp:2", train_steps=2, lr_schedule="constant")
    found |= curve(tmp_path, given, "single:1", lr_schedule="constant")
    same(found, curve(tmp_path / "whole", given, "single:1", lr_schedule="constant"))
    assert found != alone


@pytest.mark.parametrize(
    "layout", ["pp2:2", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("ddp+pp2:4", "fsdp+pp2:4"))]
)
def test_a_stage_may_have_nothing_to_train(tmp_path: Path, given: dict[str, Any], layout: str) -> None:
    """A large head is a stage of its own, and frozen."""
    folders.folder(tmp_path / "model", num_hidden_layers=2)
    settings = {**given, "init_ckpt": str(tmp_path / "model"), "lr_schedule": "constant"}
    wanted = curve(tmp_path / "alone", settings, "single:1")
    found = curve(tmp_path / "run", settings, layout, train_steps=2)
    same(found | curve(tmp_path / "run", settings, layout), wanted)


def test_a_run_goes_on_with_its_own_adapters_only(tmp_path: Path, given: dict[str, Any]) -> None:
    """Others would be another training, and its export another model: said with both."""
    curve(tmp_path, given, "single:1", train_steps=1)
    others = (("lora_alpha", 24, "alpha=24.0"), ("lora_rank", 0, "None"), ("lora_targets", "q_proj", "'q_proj'"))
    for name, value, found in others:
        with pytest.raises(ConfigError, match=f"adapters that this run was begun with.*alpha=12.*{found}"):
            train(LLMConfig.of({**given, "output_dir": str(tmp_path), "strategy": "single", name: value}))
    kept = Lora.read(tmp_path / folder.KEPT)
    assert kept is not None
    curve(tmp_path, given, "single:1", lora_dropout=0.1, lora_targets=",".join(reversed(kept.targets)))


def test_what_an_attempt_without_a_commit_left_is_not_kept(tmp_path: Path, given: dict[str, Any]) -> None:
    """The next one begins anew, and may have other adapters, or none."""
    place = tmp_path / "run"
    model = Path(given["init_ckpt"])
    folder.keep(model, model, place, Lora(8, 64, 0.0, ("q_proj",)))
    folder.keep(model, model, place, Lora(4, 8, 0.0, ("q_proj",)))
    assert Lora.read(place / folder.KEPT) == Lora(4, 8, 0.0, ("q_proj",))
    folder.keep(model, model, place)
    assert Lora.read(place / folder.KEPT) is None


def test_only_adapters_move(run: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]]) -> None:
    """The weights of the folder are those of the checkpoint."""
    assert alone[STEPS - 1][0] < alone[0][0]
    opened = Opened(address.find(str(run)))
    own, _ = opened.weights("model", "model")
    before = load_file(f"{given['init_ckpt']}/model.safetensors")
    after = {name: opened.tensor(place) for name, place in own.items()}
    for name, value in before.items():
        assert torch.equal(after[name], value.double()), name
    moved = [name for name, value in after.items() if name.endswith("lora_B") and value.any()]
    assert len(moved) == 4 * 7


def test_transformers_loads_the_merged_weights(tmp_path: Path, given: dict[str, Any]) -> None:
    """Their logits are those of the model with its adapters; the head is tied."""
    folders.folder(tmp_path / "tied", tie_word_embeddings=True)
    curve(tmp_path / "run", given, "single:1", init_ckpt=str(tmp_path / "tied"), lora_targets="q_proj, down_proj")
    folder.write(str(tmp_path / "run"), tmp_path / "out", dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "tied").eval()
    ours, _ = generate.loaded(str(tmp_path / "run"), torch.device("cpu"))
    tokens = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = theirs(tokens).logits, ours(tokens)
        assert not torch.allclose(before(tokens).logits, wanted, atol=1e-3)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_frozen_is_held_in_what_is_computed_in(tmp_path: Path, given: dict[str, Any]) -> None:
    """In bf16 half of the memory; adapters stay in float32."""
    curve(tmp_path, given, "single:1", precision="bf16", train_steps=1)
    opened = Opened(address.find(str(tmp_path)))
    own, _ = opened.weights("model", "model")
    kinds = {("lora_" in name, opened.facts[place].dtype) for name, place in own.items()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_an_unknown_target_is_named(given: dict[str, Any]) -> None:
    """With those that there are."""
    model = Decoder(read(Path(given["init_ckpt"])))
    with pytest.raises(ConfigError, match=r"lora_targets names what layers do not have.*Found: c_attn.*q_proj"):
        adapt(model, Lora(4, 8, 0.0, ("c_attn",)))


def test_dropout_of_adapters_is_refused_beside_tensor_parallel() -> None:
    """What tensor ranks draw would differ."""
    with pytest.raises(ConfigError, match="lora_dropout and model_parallel_size exclude each other"):
        LLMConfig.of({"lora_dropout": "0.1", "model_parallel_size": "2"})
