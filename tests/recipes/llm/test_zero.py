from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_train import trained
from worldsize.errors import ConfigError
from worldsize.recipes.llm import zero
from worldsize.recipes.llm.config import LLMConfig

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": "auto", "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 0, "total_num_steps": "auto"}},
    "gradient_clipping": 0.5, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "overlap_comm": True}, "steps_per_print": 2000,
}  # fmt: skip


def applied(folder: Path, found: dict[str, Any], ranks: int = 2, **given: Any) -> tuple[LLMConfig, zero.Taken]:
    """The settings with those of a file."""
    path = folder / "llama.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return zero.apply(LLMConfig.of({"deepspeed_config": str(path), **given}), ranks)


def test_what_the_file_says_is_what_is_trained(tmp_path: Path) -> None:
    """Batch by the real number of ranks, optimizer, schedule, clipping, precision; the rest is DeepSpeed's."""
    config, taken = applied(tmp_path, LLAMA)
    names = ("global_batch", "micro_batch", "lr", "beta1", "beta2", "weight_decay", "clip", "precision", "strategy")
    assert [getattr(config, name) for name in names] == [16, 2, 1e-3, 0.8, 0.99, 0.05, 0.5, "bf16", "deepspeed"]
    assert (config.lr_schedule, config.warmup_steps, config.min_lr_share) == ("linear", 3, 0.0)
    assert taken.rest is not None
    assert taken.rest["zero_optimization"] == {"stage": 1, "overlap_comm": True}
    assert not {"scheduler", "optimizer"} & taken.rest.keys()
    assert taken.unused == []


@pytest.mark.parametrize(("stage", "strategy"), [(0, "ddp"), (1, "fsdp"), (3, "fsdp")])
def test_a_pipeline_shards_as_much_and_names_the_rest(tmp_path: Path, stage: int, strategy: str) -> None:
    """Pipe and tensor parts take no share of the batch."""
    found = {**LLAMA, "zero_optimization": {"stage": stage, "overlap_comm": True}}
    config, taken = applied(tmp_path, found, 8, pipe_parallel_size=2, model_parallel_size=2)
    assert (config.global_batch, config.strategy) == (2 * 4 * 2, strategy)
    assert taken.rest is None
    assert taken.unused == ["steps_per_print", "zero_optimization.overlap_comm"]


@pytest.mark.parametrize(
    ("change", "given", "found"),
    [
        ({}, {"lr": "2e-3"}, "contradicts --lr. Found: 0.001 there, 0.002 here"),
        ({"train_batch_size": 12}, {}, r"12 and 2 \* 4 \* 2 = 16"),
        ({"optimizer": {"type": "Lion"}}, {}, "optimizer.type Lion"),
        ({"scheduler": {"type": "OneCycle"}}, {}, "OneCycle"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], given: dict[str, Any], found: str) -> None:
    """With both values."""
    with pytest.raises(ConfigError, match=found):
        applied(tmp_path, {**LLAMA, **change}, **given)


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """With the numbers."""
    with pytest.raises(ConfigError, match="3 ranks, 2 parts"):
        applied(tmp_path, LLAMA, 3, pipe_parallel_size=2)


def test_the_file_trains_the_same_by_deepspeed_and_by_a_pipeline(tmp_path: Path) -> None:
    """One JSON, whole models under DeepSpeed and two stages of ours: one curve."""
    folders.folder(tmp_path / "model")
    data = folders.lines(tmp_path / "data.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(40)))
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    found = {
        **{key: value for key, value in LLAMA.items() if key not in ("bf16", "gradient_accumulation_steps")},
        **batch,
    }
    (tmp_path / "llama.json").write_text(json.dumps(found), encoding="utf-8")
    shared = {
        "init_ckpt": str(tmp_path / "model"), "data_path": str(data), "cache_dir": str(tmp_path / "cache"), "train_steps": 4,
        "max_seq_len": 32, "precision": "fp64", "device": "cpu", "deepspeed_config": str(tmp_path / "llama.json"),
    }  # fmt: skip
    curves = []
    for pipe in (1, 2):
        run = tmp_path / f"run{pipe}"
        pool(2).run(trained, {**shared, "output_dir": str(run), "pipe_parallel_size": pipe})
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curves.append([(row["loss"], row["grad_norm"], row["lr"]) for row in rows if "loss" in row])
    assert len(curves[0]) == 4
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=1e-10)
