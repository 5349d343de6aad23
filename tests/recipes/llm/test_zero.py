from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from tests.examples.programs import ROOT
from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_train import trained
from tests.strategies.test_deepspeed_config import HUGGING_FACE
from worldsize.errors import ConfigError
from worldsize.recipes.llm import zero
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.train import _adamw, _schedule

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
    assert (config.warmup_shape, config.warmup_min_share) == ("log", 0.0)
    assert taken.rest is not None
    assert taken.rest["zero_optimization"] == {"stage": 1, "overlap_comm": True}
    assert not {"scheduler", "optimizer"} & taken.rest.keys()
    assert (taken.unused, taken.notes) == ([], [])


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
        ({"optimizer": {"params": [1]}}, {}, "optimizer.params is a section"),
        ({"scheduler": {"type": ["WarmupLR"]}}, {}, "a schedule that the recipe does not have"),
        ({"zero_optimization": {"stage": 7}}, {"pipe_parallel_size": 2}, "stage is 0, 1, 2 or 3. Found: 7"),
        ({"scheduler": {"type": "OneCycle"}}, {}, "OneCycle"),
        ({"zero_optimization": {"stag": 1}}, {}, "did you mean zero_optimization.stage?"),
        (
            {"optimizer": {"params": {"adam_w_mode": False}}},
            {},
            "adam_w_mode is not what .* Found: false there, true here",
        ),
        ({"optimizer": {"params": {"amsgrad": True}}}, {}, "amsgrad is not what .* Found: true there, false here"),
        ({"optimizer": {"params": {"bias_correction": False}}}, {}, "bias_correction is not what"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, {}, "max_grad_norm .* Do: say gradient_clipping"),
        ({"optimizer": {"params": {"epsilon": 1e-6}}}, {}, "epsilon is not known. Do: did you mean eps?"),
        ({"optimizer": {"params": {"betas": 0.9}}}, {}, "betas are two numbers. Found: 0.9"),
        (
            {"optimizer": {"params": {"eps": 1e-6}}},
            {"eps": "1e-5"},
            "contradicts --eps. Found: 1e-06 there, 1e-05 here",
        ),
        (
            {"bf16": {"enabled": False}},
            {"precision": "bf16"},
            "contradicts --precision. Found: fp32 there, bf16 here",
        ),
        ({"fp16": {"enabled": True}}, {}, "several precisions"),
        ({"bf16": {"enabled": "yes"}}, {}, 'bf16.enabled is true, false or auto. Found: "yes"'),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, {}, "fp16_master_weights_and_grads contradicts the run"),
        ({"train_micro_batch_size_per_gpu": "2"}, {}, "numbers of a batch count.* Found: '2'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], given: dict[str, Any], found: str) -> None:
    """With both values."""
    with pytest.raises(ConfigError, match=found):
        applied(tmp_path, {**LLAMA, **change}, **given)


@pytest.mark.parametrize(
    ("params", "given", "found"),
    [
        ({"total_num_steps": 9}, {"train_steps": 8}, "contradicts --train_steps. Found: 9 there, 8 here"),
        ({"total_num_steps": 9}, {"epochs": 2}, "total_num_steps 9 there, 2 epochs here"),
        ({"warmup_type": "linear"}, {"warmup_shape": "log"}, "contradicts --warmup_shape"),
        ({"warmup_type": "cubic"}, {}, "warmup_shape"),
        (
            {"warmup_max_lr": 0.0005, "warmup_min_lr": 0.01},
            {},
            "warmup_min_lr lies between 0 and .* Found: 0.01 and 0.0005",
        ),
        ({"last_batch_iteration": 5}, {}, "last_batch_iteration is not known"),
        ({"warmup_min_ratio": 0.1}, {}, "warmup_min_ratio is not known. Do: did you mean warmup_min_lr?"),
    ],
)
def test_a_schedule_that_contradicts_is_refused(
    tmp_path: Path, params: dict[str, Any], given: dict[str, Any], found: str
) -> None:
    """With both values, those that DeepSpeed takes by default among them."""
    file = {
        **LLAMA, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=found):
        applied(tmp_path, file, **given)


@pytest.mark.parametrize(
    ("params", "rate", "told"),
    [
        (
            {"warmup_max_lr": 0.002},
            0.002,
            "optimizer.params.lr 0.0005 gives way to scheduler.params.warmup_max_lr 0.002",
        ),
        (
            {},
            0.0005,
            "rises to optimizer.params.lr 0.0005; DeepSpeed alone would go to 0.001, the default of WarmupDecayLR",
        ),
        ({"warmup_max_lr": 0.0005}, 0.0005, ""),
        ({"warmup_max_lr": "auto", "last_batch_iteration": -1}, 0.0005, ""),
    ],
)
def test_two_learning_rates_are_told(tmp_path: Path, params: dict[str, Any], rate: float, told: str) -> None:
    """The schedule's wins where it is written, as by DeepSpeed."""
    file = {
        **LLAMA, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }  # fmt: skip
    config, taken = applied(tmp_path, file)
    assert config.lr == rate
    assert told in (taken.notes or [""])[0]
    assert bool(taken.notes) == bool(told)


def test_keys_of_other_programs_are_named_in_a_pipeline(tmp_path: Path) -> None:
    """Beside DeepSpeed's sections; on whole models, where it would read the file, they are errors."""
    found = {**LLAMA, "lr-decay-style": "cosine", "warmup": 0.1}
    _, taken = applied(tmp_path, found, pipe_parallel_size=2)
    assert {"lr-decay-style", "warmup"} < set(taken.unused)
    with pytest.raises(ConfigError, match="lr-decay-style is not known"):
        applied(tmp_path, found)


def test_the_example_is_trained_as_it_says(tmp_path: Path) -> None:
    """Nothing of the file in examples/llm needs a word."""
    found = json.loads((ROOT / "examples" / "llm" / "configs" / "llama.json").read_text(encoding="utf-8"))
    assert applied(tmp_path, found, pipe_parallel_size=2)[1].notes == []


def test_a_schedule_without_a_type_is_refused(tmp_path: Path) -> None:
    """Its numbers alone are no schedule; all at auto they say nothing."""
    with pytest.raises(ConfigError, match=r"scheduler\.params without scheduler\.type"):
        applied(tmp_path, {"scheduler": {"params": {"warmup_num_steps": 5}}})
    config, _ = applied(tmp_path, {"scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}}})
    assert not {"lr_schedule", "warmup_steps"} & config.model_fields_set


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("WarmupLR", {}, {"lr_schedule": "constant", "warmup_steps": 1000, "warmup_shape": "log", "lr": 1e-4}),
        (
            "WarmupLR",
            {"warmup_min_lr": 1e-5, "warmup_type": "linear"},
            {"warmup_min_share": 0.1, "warmup_shape": "linear"},
        ),
        ("WarmupDecayLR", {"total_num_steps": 50}, {"train_steps": 50, "lr": 1e-3, "min_lr_share": 0.0}),
        ("WarmupDecayLR", {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}, {"lr": 1e-4, "warmup_steps": 0}),
        ("WarmupCosineLR", {"warmup_min_ratio": 0.25}, {"warmup_min_share": 0.25, "min_lr_share": 0.0001}),
        ("WarmupCosineLR", {"cos_min_ratio": 0.5}, {"lr_schedule": "cosine", "min_lr_share": 0.5}),
    ],
)
def test_each_number_of_a_schedule_is_taken(
    tmp_path: Path, kind: str, params: dict[str, Any], expected: dict[str, Any]
) -> None:
    """What is left out is as DeepSpeed has it, what is at auto as the flags have it."""
    config, _ = applied(tmp_path, {"scheduler": {"type": kind, "params": params}})
    assert {name: getattr(config, name) for name in expected} == pytest.approx(expected)


def test_a_flag_wins_over_a_default_of_deepspeed(tmp_path: Path) -> None:
    """The file does not say it."""
    config, _ = applied(tmp_path, {"scheduler": {"type": "WarmupDecayLR"}}, lr=3e-4, warmup_shape="linear")
    assert (config.lr, config.warmup_shape, config.warmup_steps) == (3e-4, "linear", 1000)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_the_learning_rate_rises_as_by_deepspeed(kind: Literal["log", "linear"]) -> None:
    """By its own formula, of the step after for a line; then it stays."""
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="DeepSpeed is not installed")
    ours, theirs = (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3) for _ in range(2))
    config = LLMConfig(lr_schedule="constant", warmup_steps=4, warmup_shape=kind, warmup_min_share=0.1)
    schedule, other = _schedule(config, ours, 8), schedules.WarmupLR(theirs, 1e-4, 1e-3, 4, kind)
    for step in range(6):
        other.step(step + (kind == "linear"))
        assert schedule.get_last_lr() == pytest.approx(other.get_last_lr())
        ours.step()
        schedule.step()


@pytest.mark.parametrize("parts", [1, 2])
def test_the_optimizer_has_the_files_eps(tmp_path: Path, parts: int) -> None:
    """By DeepSpeed and in a pipeline: the recipe makes the optimizer of both."""
    found = {"optimizer": {"type": "AdamW", "params": {"eps": 1e-6, "adam_w_mode": True, "amsgrad": False}}}
    config, _ = applied(tmp_path, found, pipe_parallel_size=parts)
    assert _adamw(config, torch.nn.Linear(2, 2)).defaults["eps"] == 1e-6


@pytest.mark.parametrize(
    ("batch", "given", "expected"),
    [
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, {}, (16, 4)),
        ({"gradient_accumulation_steps": 2}, {"global_batch": 12}, (12, 3)),
        ({"gradient_accumulation_steps": 2}, {"micro_batch": 3}, (12, 3)),
        ({"gradient_accumulation_steps": 2}, {}, (4, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, {}, (6, 3)),
        ({"train_micro_batch_size_per_gpu": 3, "train_batch_size": "auto"}, {"global_batch": 12}, (12, 3)),
    ],
)
def test_the_numbers_of_a_batch_follow(
    tmp_path: Path, batch: dict[str, Any], given: dict[str, Any], expected: tuple[int, int]
) -> None:
    """From two of the three, the flags' among them, as DeepSpeed has it."""
    config, _ = applied(tmp_path, batch, 2, **given)
    assert (config.global_batch, config.micro_batch) == expected


@pytest.mark.parametrize(
    ("batch", "given", "found"),
    [
        ({"train_batch_size": 18, "gradient_accumulation_steps": 4}, {}, r"18 and 4 \* 2 = 8"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, {"micro_batch": 2}, r"16 and 2 \* 2 \* 2 = 8"),
        (
            {"gradient_accumulation_steps": 2},
            {"micro_batch": "auto"},
            "needs a micro-batch. Found: --micro_batch auto",
        ),
    ],
)
def test_numbers_of_a_batch_that_cannot_be_are_refused(
    tmp_path: Path, batch: dict[str, Any], given: dict[str, Any], found: str
) -> None:
    """With all of them."""
    with pytest.raises(ConfigError, match=found):
        applied(tmp_path, batch, 2, **given)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "bf16"),
    ],
)
def test_a_precision_that_is_said_is_taken(tmp_path: Path, sections: dict[str, Any], expected: str) -> None:
    """One that is switched off, and no other on, is float32."""
    config, taken = applied(tmp_path, sections)
    assert (config.precision, taken.notes) == (expected, [])


@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}])
def test_a_precision_that_is_not_said_is_told(tmp_path: Path, sections: dict[str, Any]) -> None:
    """DeepSpeed would take float32; a flag ends the doubt."""
    config, taken = applied(tmp_path, sections)
    assert config.precision == "bf16"
    assert taken.notes == [f"{tmp_path}/llama.json says nothing of precision: bf16, as without a file"]
    assert applied(tmp_path, sections, precision="fp32")[1].notes == []


def test_the_same_number_in_other_words_is_no_contradiction(tmp_path: Path) -> None:
    """Files have rates as text too."""
    assert applied(tmp_path, {"optimizer": {"params": {"lr": "1e-4"}}}, lr=1e-4)[0].lr == 1e-4


@pytest.mark.parametrize(
    ("off", "given"), [("fp16", "bf16"), ("fp16", "fp64"), ("bf16", "fp16"), ("bf16", "fp64"), ("fp16", "fp32")]
)
def test_what_is_switched_off_leaves_the_others(tmp_path: Path, off: str, given: str) -> None:
    """fp32 only where nobody says more."""
    assert applied(tmp_path, {off: {"enabled": False}}, precision=given)[0].precision == given


@pytest.mark.parametrize("parts", [1, 2])
def test_what_has_no_counterpart_is_named(tmp_path: Path, parts: int) -> None:
    """The loss scale, and how an optimizer computes, under DeepSpeed too; in a pipeline what else was meant for it."""
    found = {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": "auto"},
        "optimizer": {"type": "Adam", "params": {"fused": True}}, "activation_checkpointing": {"cpu_checkpointing": True},
        "wall_clock_breakdown": False, "torch_autocast": {"enabled": False, "dtype": "float16"},
    }  # fmt: skip
    _, taken = applied(tmp_path, found, pipe_parallel_size=parts)
    everywhere = ["fp16.initial_scale_power", "fp16.loss_scale", "optimizer.params.fused"]
    assert taken.unused == (["activation_checkpointing"] if parts > 1 else []) + everywhere
    assert taken.notes == [f"of {tmp_path}/llama.json without effect here: {', '.join(taken.unused)}"]


def test_a_file_at_auto_says_nothing(tmp_path: Path) -> None:
    """As files for transformers have it: all is as the flags say, but for the curve that the schedule's type names."""
    config, taken = applied(tmp_path, HUGGING_FACE, lr=3e-4, precision="bf16")
    assert config.model_fields_set == {
        "deepspeed_config",
        "lr",
        "precision",
        "strategy",
        "lr_schedule",
        "min_lr_share",
        "warmup_shape",
    }
    assert (config.lr_schedule, taken.unused) == ("linear", [])


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """With the numbers."""
    with pytest.raises(ConfigError, match="3 ranks, 2 parts"):
        applied(tmp_path, LLAMA, 3, pipe_parallel_size=2)


def test_the_file_trains_the_same_by_deepspeed_and_by_a_pipeline(tmp_path: Path) -> None:
    """One JSON, whole models under DeepSpeed and two stages of ours: one curve, with an eps that is felt."""
    folders.folder(tmp_path / "model")
    data = folders.lines(tmp_path / "data.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(40)))
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    found = {
        **{key: value for key, value in LLAMA.items() if key not in ("bf16", "gradient_accumulation_steps")},
        **batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-2}},
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
