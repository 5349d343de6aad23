"""Models that the native decoder does not compute, by transformers' own code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_train import trained
from worldsize.errors import ConfigError
from worldsize.recipes.llm import folder, generate, impl, shape
from worldsize.recipes.llm.config import LLMConfig

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
TEXTS = [f"{number} and {number + 1}" for number in range(16)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny GPT-2 and texts."""
    place = tmp_path_factory.mktemp("gpt2")
    folders.folder(place / "model", "gpt2", **GPT2)
    path = folders.lines(place / "data.jsonl", ({"text": text} for text in TEXTS))
    return {
        "init_ckpt": str(place / "model"), "data_path": str(path), "cache_dir": str(place / "cache"), "precision": "fp64",
        "train_steps": 3, "max_seq_len": 32, "global_batch": 8, "micro_batch": 2, "lr": "1e-2", "device": "cpu",
    }  # fmt: skip


def curve(run: Path, given: dict[str, Any], ranks: int, **more: Any) -> list[float]:
    """The losses of a training."""
    pool(ranks).run(trained, {**given, "output_dir": str(run), **more})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_one_curve_and_transformers_own_loss(tmp_path: Path, given: dict[str, Any]) -> None:
    """On one rank and on two, whole and in shards; the folder that is written goes back into transformers."""
    alone = curve(tmp_path / "alone", given, 1)
    for strategy in ("ddp", "fsdp"):
        assert curve(tmp_path / strategy, given, 2, strategy=strategy) == pytest.approx(alone, rel=1e-10)
    folder.write(str(tmp_path / "fsdp"), tmp_path / "out", dtype="fp64")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    logits, tokenizer = generate.loaded(str(tmp_path / "alone"), CPU)
    tokens = torch.tensor([tokenizer("7 and 8")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(logits(tokens), theirs.float()(tokens).logits, rtol=1e-5, atol=1e-5)


def test_the_first_loss_is_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    """Of one step over all samples."""
    first = curve(tmp_path / "run", {**given, "global_batch": 16, "train_steps": 1}, 1)[0]
    model = AutoModelForCausalLM.from_pretrained(given["init_ckpt"], dtype=torch.float64)
    tokenizer, total, count = folders.tokenizer(), 0.0, 0
    for text in TEXTS:
        tokens = torch.tensor([[*tokenizer(text)["input_ids"], 2]])
        with torch.no_grad():
            total += model(tokens, labels=tokens).loss.item() * (tokens.shape[1] - 1)
        count += tokens.shape[1] - 1
    assert first == pytest.approx(total / count, rel=1e-6)  # its loss is computed in float32


def test_native_by_name_is_refused_with_the_other_way(given: dict[str, Any]) -> None:
    """And a pipeline is refused for what is not ours."""
    config = LLMConfig.of({**given, "model_impl": "native"})
    assert config.init_ckpt is not None
    with pytest.raises(shape.ForeignError, match="--model_impl transformers"):
        impl.chosen(config, config.init_ckpt, CPU)
    config = LLMConfig.of({**given, "pipe_parallel_size": "2"})
    assert config.init_ckpt is not None
    with pytest.raises(ConfigError, match="pipe_parallel_size is for the native decoder"):
        impl.chosen(config, config.init_ckpt, CPU)


def test_the_same_model_by_both(tmp_path: Path, given: dict[str, Any]) -> None:
    """A Llama, by our code and by transformers': one curve, where rows hold one sample each."""
    folders.folder(tmp_path / "llama")
    same = {**given, "init_ckpt": str(tmp_path / "llama"), "packing": "false"}
    ours = curve(tmp_path / "ours", same, 1)
    theirs = curve(tmp_path / "theirs", {**same, "model_impl": "transformers"}, 1)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("said", "found"),
    [({"model_type": "nonesuch"}, "nonesuch"), ({"model_type": "t5"}, "T5Config"), ({}, "model_type")],
)
def test_what_transformers_does_not_make_is_said(tmp_path: Path, said: dict[str, Any], found: str) -> None:
    """In one line, in a training as for looking at a model."""
    folders.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**said, "vocab_size": 264}))
    with pytest.raises(ConfigError, match=rf"no causal language model of .*{found}"):
        generate.loaded(str(tmp_path), torch.device("cpu"))
    with pytest.raises(ConfigError, match=rf"no causal language model of .*{found}"):
        impl.causal(tmp_path, fresh=False)
