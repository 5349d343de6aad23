"""Hugging Face folders for tests, made by transformers: the oracle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SMALL = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
END, START = "</s>", "<s>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def made(family: str, **settings: Any) -> Any:
    """A model of transformers with fresh weights that differ everywhere."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, "initializer_range": 0.2, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                value.add_(torch.randn_like(value) * 0.1)
    return model


def tokenizer() -> Any:
    """One token a byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<pad>", START, END, *letters])}
    bare = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token=START, eos_token=END, pad_token="<pad>")
    found.chat_template = TEMPLATE
    return found


def folder(path: Path, family: str = "llama", *, shards: str = "1GB", **settings: Any) -> Any:
    """Write a model and its tokenizer there; the model."""
    model = made(family, **settings)
    model.save_pretrained(path, max_shard_size=shards)
    tokenizer().save_pretrained(path)
    return model


def lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
