"""A rank reads what it holds of a Hugging Face folder: memory while loading is little more than its shard."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import worldsize as ws
from tests.integration.test_loading_memory import resident
from worldsize.recipes.llm import impl, shape
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.model import Decoder
from worldsize.runtime.sharded import local
from worldsize.testing.ranks import RankPool

CONFIG = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Many layers: one of them is whole on a rank at a time while the model is made."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with few parameters."""
    place = tmp_path_factory.mktemp("small")
    config = {
        **CONFIG,
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    (place / "config.json").write_text(json.dumps(config))
    save_file(Decoder(shape.of(config)).state_dict(), place / "model.safetensors")
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 160 million parameters in bf16, in two files."""
    place = tmp_path_factory.mktemp("wide")
    (place / "config.json").write_text(json.dumps(CONFIG))
    values = {name: value.bfloat16() for name, value in Decoder(shape.of(CONFIG)).state_dict().items()}
    names = sorted(values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: values[name] for name in own}, place / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return place


def warmed(folder: Path, small: Path, run_dir: Path, strategy: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """How loading goes in a process that has imported what it takes.

    What is freed is given back: what is measured is what is held, and not what glibc keeps for later. Said by a call, because
    ranks are forked from an interpreter, and glibc reads its environment variables only once.
    """
    libc = ctypes.CDLL(None)
    assert all(libc.mallopt(each, 65536) for each in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
    loaded(small, run_dir / "small", strategy, sizes)
    return loaded(folder, run_dir / "wide", strategy, sizes)


def loaded(folder: Path, run_dir: Path, strategy: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """How far memory rose from before there was a model until its weights were read, and how large this rank's part is."""
    run = ws.Run(run_dir, global_batch=2, micro_batch=1, duration="1st", strategy=strategy, device="cpu", **sizes)
    own = impl.chosen(LLMConfig.of({"device": "cpu"}), folder, torch.device("cpu"))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    model = own.place(run, {}, fresh=False)
    rose = resident("VmHWM") - before
    held = sum(local(value).numel() * value.element_size() for value in model.parameters())
    run.close()
    return rose, held


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "sizes", "ranks"), [("single", {}, 1), ("fsdp", {}, 2), ("ddp", {"tp": 2}, 2), ("ddp", {"pp": 2}, 2)]
)
def test_loading_needs_little_more_than_the_shard(  # noqa: PLR0917 - three of them are fixtures
    folder: Path, small: Path, tmp_path: Path, strategy: str, sizes: dict[str, int], ranks: int
) -> None:
    """At most 1.2 times as much, the making of the model included, from bf16 files into float32 parameters."""
    with RankPool(ranks) as pool:
        for rose, own in pool.run(warmed, folder, small, tmp_path / "run", strategy, sizes, timeout=300):
            assert rose <= 1.2 * own, (rose, own)
