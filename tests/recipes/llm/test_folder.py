"""From a Hugging Face folder into a run, and out again."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_train import curve, same, trained
from worldsize.errors import CheckpointError
from worldsize.recipes.llm import folder, generate

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
TEMPLATE = "additional_chat_templates/tools.jinja"


@pytest.fixture(scope="module", params=["own head", "tied", "sharded"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on two ranks, from a folder of each kind."""
    place = tmp_path_factory.mktemp("run")
    shards = "40KB" if request.param == "sharded" else "1GB"
    folders.folder(place / "model", shards=shards, tie_word_embeddings=request.param == "tied")
    templates = place / "model" / TEMPLATE
    templates.parent.mkdir()
    templates.write_text("{{ messages }}", encoding="utf-8")
    path = folders.lines(place / "data.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(20)))
    settings = {
        "init_ckpt": str(place / "model"), "data_path": str(path), "cache_dir": str(place / "cache"), "precision": "fp32",
        "output_dir": str(place / "run"), "train_steps": 2, "max_seq_len": 32, "global_batch": 2, "lr": "1e-2", "device": "cpu",
    }  # fmt: skip
    pool(2).run(trained, {**settings, "strategy": "fsdp"})
    return place / "run"


@pytest.mark.parametrize("impl", ["native", pytest.param("transformers", marks=pytest.mark.matrix)])
def test_it_goes_on_without_the_folder_that_it_began_from(tmp_path: Path, impl: str) -> None:
    """A commit has all weights, and the run what else belongs to the model."""
    folders.folder(tmp_path / "model")
    path = folders.lines(tmp_path / "data.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(20)))
    settings = {
        "init_ckpt": str(tmp_path / "model"), "data_path": str(path), "cache_dir": str(tmp_path / "cache"), "precision": "fp64",
        "max_seq_len": 32, "global_batch": 2, "lr": "1e-2", "lr_schedule": "constant", "device": "cpu", "model_impl": impl,
    }  # fmt: skip
    wanted = curve(tmp_path / "whole", settings, "single:1", train_steps=2)
    curve(tmp_path / "run", settings, "single:1", train_steps=1)
    shutil.rmtree(tmp_path / "model")
    same(curve(tmp_path / "run", settings, "single:1", train_steps=2), wanted)


def test_an_exported_folder_is_loaded_by_transformers(run: Path, tmp_path: Path) -> None:
    """The same logits as the run's, and others than before the training; its tokenizer with it."""
    folder.write(str(run), tmp_path / "out", dtype="fp32", shard="50KB")
    assert (tmp_path / "out" / TEMPLATE).is_file()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, tokenizer = generate.loaded(str(run), CPU)
    tokens = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, ours(tokens)
        before = generate.loaded(str(run.parent / "model"), CPU)[0](tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"] == tokenizer("abc")["input_ids"]


def test_it_is_in_bf16_if_nothing_else_is_said(run: Path, tmp_path: Path) -> None:
    """And the config says so."""
    folder.write(str(run), tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.bfloat16


def test_what_is_generated_is_what_transformers_generates(run: Path, tmp_path: Path) -> None:
    """The likeliest tokens, one after another."""
    folder.write(str(run), tmp_path / "out", dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, tokenizer = generate.loaded(str(run), CPU)
    tokens = generate.encoded(tokenizer, "7 and", chat=False)
    wanted = theirs.generate(tokens[None], max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(tokens) :]
    assert generate.go_on(ours, tokens, 12).tolist() == wanted.tolist()


def test_what_is_drawn_follows_the_seed() -> None:
    """And the temperature."""
    logits = torch.arange(5.0)

    def model(tokens: torch.Tensor) -> torch.Tensor:
        return logits.expand(1, tokens.shape[1], 5)

    def drawn(**how: Any) -> list[int]:
        found: list[int] = generate.go_on(model, torch.tensor([0]), 200, **how).tolist()
        return found

    assert drawn() == [4] * 200
    assert drawn(temperature=1.0, seed=1) == drawn(temperature=1.0, seed=1) != drawn(temperature=1.0, seed=2)
    shares = [drawn(temperature=1.0).count(token) / 200 for token in range(5)]
    assert shares == pytest.approx(torch.softmax(logits, 0).tolist(), abs=0.1)
    assert sorted(set(drawn(temperature=0.05))) == [4]


def test_a_run_of_something_else_is_said(tmp_path: Path) -> None:
    """With the command for it."""
    with pytest.raises(CheckpointError, match="worldsize checkpoint export"):
        folder.beside(tmp_path)
