"""A head that is the embedding: one weight under every layout, also where its two uses lie at the ends of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recipes.llm import folders
from tests.recipes.llm.test_train import STEPS, curve, same
from worldsize.checkpoint import address
from worldsize.checkpoint.opened import Opened
from worldsize.recipes.llm import folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tied model, texts, and the settings that are the same for all."""
    place = tmp_path_factory.mktemp("tied")
    folders.folder(place / "model", num_hidden_layers=4, tie_word_embeddings=True)
    folders.lines(place / "data.jsonl", ({"text": f"{number} and {number + 1}"} for number in range(60)))
    return {
        "init_ckpt": str(place / "model"), "data_path": str(place / "data.jsonl"), "cache_dir": str(place / "cache"),
        "max_seq_len": 32, "global_batch": 8, "micro_batch": 2, "train_steps": STEPS, "precision": "fp64", "lr": "1e-2",
        "lr_schedule": "constant", "device": "cpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """What one process does."""
    return curve(tmp_path_factory.mktemp("alone"), given, "single:1")


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp:2", "tp2:2", "pp2:2", "zero3:2", *(
            pytest.param(layout, marks=pytest.mark.matrix)
            for layout in ("tp2+pp2:4", "fsdp+pp2:4", "pp3:3", "pp2+schedule=zbvzerobubble:2")
        ),
    ],
)  # fmt: skip
def test_every_layout_has_one_curve(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]], layout: str
) -> None:
    """Losses and norms: what both uses give is summed, and counted once."""
    same(curve(tmp_path, given, layout), alone)


def test_fresh_weights_are_those_of_one_process(tmp_path: Path, given: dict[str, Any]) -> None:
    """Each end of the pipeline has drawn its own."""
    fresh = {**given, "from_scratch": "true", "train_steps": 2}
    same(curve(tmp_path / "pp", fresh, "pp2:2"), curve(tmp_path / "one", fresh, "single:1"))


def test_it_goes_on_elsewhere_and_is_written_once(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]]
) -> None:
    """Two stages, two tensor parts, two stages; transformers then loads what came of it."""
    found: dict[int, tuple[float, float]] = {}
    for steps, layout in ((2, "pp2:2"), (4, "tp2:2"), (STEPS, "pp2:2")):
        found |= curve(tmp_path / "run", given, layout, train_steps=steps)
    same(found, alone)
    own, ties = Opened(address.find(str(tmp_path / "run"))).weights("model", "model")
    assert "lm_head.weight" not in own
    assert ties == {"lm_head.weight": "model.embed_tokens.weight"}
    folder.write(str(tmp_path / "run"), tmp_path / "out", dtype="fp64")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert made.lm_head.weight is made.model.embed_tokens.weight
