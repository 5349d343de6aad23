"""A rank reads what it holds of a Hugging Face folder: memory while loading is little more than its shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import worldsize as ws
from tests.integration.test_loading_memory import resident
from worldsize.recipes.llm import shape
from worldsize.recipes.llm.model import Decoder
from worldsize.runtime.sharded import local
from worldsize.testing.ranks import run_ranks

CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


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


def loaded(folder: Path, run_dir: Path, strategy: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """How far memory rose while weights were read, with what was there for them, and how large this rank's part is."""
    run = ws.Run(run_dir, global_batch=2, micro_batch=1, duration="1st", strategy=strategy, device="cpu", **sizes)
    model = run.model(lambda: Decoder(shape.read(folder)), init="meta")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    run.warm_start(model, folder)
    own = sum(local(value).numel() * value.element_size() for value in model.parameters())
    rose = resident("VmHWM") - before + own
    run.close()
    return rose, own


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "sizes", "ranks"), [("single", {}, 1), ("fsdp", {}, 2), ("ddp", {"tp": 2}, 2), ("ddp", {"pp": 2}, 2)]
)
def test_loading_needs_little_more_than_the_shard(
    folder: Path, tmp_path: Path, strategy: str, sizes: dict[str, int], ranks: int
) -> None:
    """At most 1.2 times as much, from bf16 files into float32 parameters."""
    for rose, own in run_ranks(loaded, ranks, folder, tmp_path / "run", strategy, sizes, timeout=300):
        assert rose <= 1.2 * own, (rose, own)
