from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.strategies.deepspeed import keys
from worldsize.strategies.deepspeed.config import AUTO, Asked, batch, read, settle

if TYPE_CHECKING:
    from pathlib import Path

ADAMW = ("AdamW", {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})
ASKED = Asked(world=8, global_batch=256, micro_batch=4, clip=1.0, precision="bf16", optimizer=ADAMW, hidden=64)


def _said(given: dict[str, Any], asked: Asked = ASKED) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(given, asked)
    return str(caught.value)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))
def test_batch_numbers_follow_from_the_run(micro: int, often: int, world: int) -> None:
    """Whichever of the three are given, and equal the run's, the three that DeepSpeed gets multiply (B083)."""
    whole = micro * often * world
    asked = Asked(world=world, global_batch=whole, micro_batch=micro)
    for which in range(8):
        pairs = (
            ("train_batch_size", whole),
            ("train_micro_batch_size_per_gpu", micro),
            ("gradient_accumulation_steps", often),
        )
        given_ = {key: value for at, (key, value) in enumerate(pairs) if which >> at & 1}
        assert batch(given_, asked) == (whole, micro, often)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 9))
def test_any_batch_of_the_run_is_passed_on(whole: int, micro: int, world: int) -> None:
    """A step that does not divide by the ranks is dealt unevenly; DeepSpeed's own numbers still multiply."""
    size, per_pass, often = batch({}, Asked(world=world, global_batch=whole, micro_batch=micro))
    assert size == per_pass * often * world >= whole
    assert per_pass == micro


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (
            {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 18},
            "Found: 256 and 4 * 18 * 8 = 576.",
        ),
        ({"train_batch_size": 128}, "Found: train_batch_size=128, global_batch=256."),
        ({"train_micro_batch_size_per_gpu": 2}, "Found: train_micro_batch_size_per_gpu=2, micro_batch=4."),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2; global_batch 256 = micro_batch 4 * 8 ranks * 8.",
        ),
        ({"train_batch_size": "many"}, "train_batch_size counts"),
    ],
)
def test_batch_numbers_that_contradict_are_named(given_: dict[str, Any], said: str) -> None:
    """The key, and both values, with the real number of ranks (B083)."""
    assert said in _said(given_)


HUGGING_FACE = {
    "bf16": {"enabled": AUTO},
    "fp16": {"enabled": AUTO, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO, "total_num_steps": AUTO},
    },
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "sub_group_size": 1e9, "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO,
        "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "steps_per_print": AUTO, "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO, "wall_clock_breakdown": False,
}  # fmt: skip


def test_every_auto_of_a_hugging_face_file_is_resolved() -> None:
    """From batch, clip, optimizer, precision and the model's width (B084)."""
    found = settle(dict(HUGGING_FACE), ASKED)
    assert AUTO not in str(found.values)
    assert found.stage == 3
    assert (found.values["train_batch_size"], found.values["gradient_accumulation_steps"]) == (256, 8)
    assert found.values["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert found.values["zero_optimization"]["stage3_param_persistence_threshold"] == 640
    assert found.values["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert found.values["bf16"] == {"enabled": True}
    assert not {"optimizer", "scheduler", "fp16"} & found.values.keys()


def test_what_does_nothing_in_a_hugging_face_file_is_named() -> None:
    """The schedule's type, and what is of saving by DeepSpeed itself."""
    assert settle(HUGGING_FACE, ASKED).idle == [
        "scheduler", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given_",
    [
        {
            "scheduler": {"type": AUTO, "params": AUTO},
            "optimizer": {"type": AUTO, "params": {"lr": AUTO, "warm": AUTO}},
        },
        {"scheduler": AUTO, "optimizer": AUTO, "fp16": AUTO, "bf16": AUTO},
        {"optimizer": {"type": "AdamW", "params": AUTO}, "scheduler": None},
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": AUTO}}, "amp": {"enabled": AUTO, "opt_level": AUTO}},
        {
            "elasticity": {"enabled": False},
            "sparse_gradients": False,
            "nebula": None,
            "gradient_allreduce_op": "mean",
        },
        {
            "zero_optimization": {
                "mics_shard_size": -1,
                "compute_grad_norm": True,
                "zenflow": None,
                "offload_param": None,
            }
        },
    ],
)
def test_what_says_nothing_is_no_contradiction(given_: dict[str, Any]) -> None:
    """A section at auto as a whole, or switched off; DeepSpeed, which refuses some of them empty, does not see it."""
    found = settle(given_, ASKED)
    assert not {"optimizer", "amp", "elasticity", "sparse_gradients", "nebula"} & found.values.keys()
    assert (found.values["zero_optimization"], found.idle) == ({"stage": 0}, [])


def test_an_auto_that_nobody_knows_is_named() -> None:
    """With its path in the file, before anything starts (B084)."""
    zero = {"stage": 2, "reduce_bucket_size": AUTO, "offload_optimizer": {"device": AUTO}}
    said = _said({"zero_optimization": zero, "comms_logger": {"prof_ops": ["all_reduce", AUTO]}}, Asked(world=2))
    paths = (
        "zero_optimization.reduce_bucket_size, zero_optimization.offload_optimizer.device, comms_logger.prof_ops[1]"
    )
    assert paths in said


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping is not known. Do: did you mean gradient_clipping?"),
        (
            {"zero_optimization": {"stag": 2}},
            "zero_optimization.stag is not known. Do: did you mean zero_optimization.stage?",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "did you mean zero_optimization.offload_param.device?",
        ),
        ({"zero_optimization": 2}, "zero_optimization is a section. Found: 2."),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage. Found: 4."),
        (
            {"gradient_clipping": 0.5},
            "gradient_clipping contradicts clip= of run.optimizer. Found: 0.5 there, 1.0 here.",
        ),
        (
            {"optimizer": {"type": "Lamb"}},
            'optimizer.type contradicts run.optimizer. Found: "Lamb" there, "AdamW" here.',
        ),
        (
            {"optimizer": {"params": {"lr": 1e-3}}},
            "optimizer.params.lr contradicts run.optimizer. Found: 0.001 there, 0.0003",
        ),
        (
            {"optimizer": {"params": {"beta": 1}}},
            "optimizer.params.beta is no setting of AdamW. Do: did you mean betas?",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler contradicts the run"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "scheduler contradicts the run"),
        ({"compile": {"deepcompile": True}}, "compile contradicts the run"),
        ({"dataloader_drop_last": True}, "the run deals the batches out, and drops none"),
        ({"nebula": {"enabled": True}}, "the run keeps checkpoints of its own"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "use the strategy 'hsdp'"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "the run computes the norm once for both"),
        ({"sparse_gradients": True}, "the ranks sum whole gradients"),
        ({"fp16": {"enabled": True}}, "fp16.enabled contradicts the run. Found: enabled, precision='bf16'."),
        (
            {"bf16": {"enabled": True}},
            "bf16.enabled contradicts precision= of the run, at a stage of 1 or more, Found",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "torch_autocast contradicts precision= of the run",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op contradicts the run"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device nvme keeps state",
        ),
    ],
)
def test_what_contradicts_or_is_unknown_is_named(given_: dict[str, Any], said: str) -> None:
    """With both values, or with the nearest name."""
    assert said.replace(", Found", ",. Found") in _said(given_)


@pytest.mark.parametrize("path", [path for path in keys.INSIDE if path not in keys.OURS])
def test_a_slip_in_any_section_is_named(path: str) -> None:
    """With its path and the nearest name; DeepSpeed itself passes over most of them."""
    right = max(keys.INSIDE[path], key=len)
    given_: dict[str, Any] = {right[:-1] + "_": 1}
    for name in reversed(path.split(".")):
        given_ = {name: given_}
    assert f"{path}.{right[:-1]}_ is not known. Do: did you mean {path}.{right}?" in _said(given_)


def test_what_has_no_effect_is_named() -> None:
    """What only NVMe, DeepSpeed's checkpoints or another stage would use; what is switched off is not."""
    zero = {"stage": 2, "stage3_max_live_parameters": 9, "sub_group_size": 9, "round_robin_gradients": True}
    offload = {"offload_optimizer": {"device": "cpu", "buffer_count": 4}}
    given_ = {
        "zero_optimization": zero | offload, "activation_checkpointing": {"number_checkpoints": 4},
        "aio": {"block_size": 9}, "checkpoint": {"load_universal": False},
    }  # fmt: skip
    zeros = ["offload_optimizer.buffer_count", "stage3_max_live_parameters", "sub_group_size"]
    expected = ["activation_checkpointing", "aio", *(f"zero_optimization.{name}" for name in zeros)]
    assert settle(given_, Asked(world=2)).idle == expected
    given_ = {"zero_optimization": {**zero, "stage": 3}}
    assert settle(given_, Asked(world=2)).idle == ["zero_optimization.round_robin_gradients"]


def test_the_loss_scale_of_a_file_is_named_as_unused() -> None:
    """The run scales losses itself."""
    fp16 = {"enabled": AUTO, "loss_scale": 128.0, "hysteresis": AUTO}
    assert settle({"fp16": fp16}, Asked(world=2, precision="fp16")).idle == ["fp16.loss_scale"]
    assert settle({"fp16": fp16}, Asked(world=2)).idle == []


def _models() -> dict[str, Any]:
    return {
        path: getattr(import_module(f"deepspeed.{module}"), name)
        for path, module, name in (
            ("zero_optimization", "runtime.zero.config", "DeepSpeedZeroConfig"),
            (
                "zero_optimization.offload_optimizer",
                "runtime.zero.offload_config",
                "DeepSpeedZeroOffloadOptimizerConfig",
            ),
            ("zero_optimization.offload_param", "runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
            ("zero_optimization.leaf_module", "runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
            ("fp16", "runtime.precision_config", "DeepSpeedFP16Config"),
            ("bf16", "runtime.precision_config", "DeepSpeedBF16Config"),
            ("comms_logger", "comm.config", "CommsLoggerConfig"),
            ("timers.throughput", "utils.config", "DeepSpeedThroughputTimerConfig"),
            ("tensorboard", "monitor.config", "TensorBoardConfig"),
            ("csv_monitor", "monitor.config", "CSVConfig"),
            ("wandb", "monitor.config", "WandbConfig"),
            ("comet", "monitor.config", "CometConfig"),
        )
    }


def test_the_keys_are_those_of_deepspeed() -> None:
    """Of each section for which DeepSpeed has a model, in the installed version."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for path, model in _models().items():
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert keys.INSIDE[path] - {"mics_shard_size", "mics_hierarchical_params_gather"} == names, path


def test_the_other_keys_are_those_that_deepspeed_reads() -> None:
    """Of each section that it takes apart itself: its constants, or what it makes of a file in which all are given."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for path, module in (
        ("flops_profiler", "profiling.constants"),
        ("aio", "runtime.swap_tensor.constants"),
        ("checkpoint", "runtime.constants"),
        ("checkpoint.writer", "runtime.model_checkpointing.constants"),
        ("activation_checkpointing", "runtime.activation_checkpointing.config"),
        ("data_types", "runtime.constants"),
        ("torch_autocast", "runtime.constants"),
    ):
        found = {value for value in vars(import_module(f"deepspeed.{module}")).values() if isinstance(value, str)}
        assert keys.INSIDE[path] - {"checkpoint_serialization", "writer"} <= found, path


def test_the_name_of_the_strategy_says_the_stage() -> None:
    """A file without a stage takes it, one with another contradicts; without a file `deepspeed` is stage 1."""
    zero2 = Asked(world=2, stage=2, named="zero2")
    assert settle({"zero_optimization": {"overlap_comm": True}}, zero2).stage == 2
    assert "Found: stage 3, strategy 'zero2'." in _said({"zero_optimization": {"stage": 3}}, zero2)
    assert [settle(None, Asked(world=2)).stage, settle({}, Asked(world=2)).stage] == [1, 0]


def test_what_is_not_ours_goes_through_unchanged() -> None:
    """Sections of DeepSpeed alone, and every key of its own in the others."""
    given_ = {
        "zero_optimization": {"stage": 1, "round_robin_gradients": True},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
    }
    found = settle(given_, Asked(world=2)).values
    assert found["comms_logger"] == given_["comms_logger"]
    assert found["zero_optimization"] == given_["zero_optimization"]


def test_a_file_is_read_with_care(tmp_path: Path) -> None:
    """A missing one, one that is no JSON, a key twice: each is one line."""
    file = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match=r"cannot be read\. Found: No such file"):
        read(file)
    for text, said in (
        ('{"a": 1, "a": 2}', "a twice"),
        ("[]", "no JSON object"),
        ("{", "no JSON that DeepSpeed could use"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read(str(file))
    file.write_text('{"steps_per_print": 3}')
    assert read(file) == {"steps_per_print": 3}
