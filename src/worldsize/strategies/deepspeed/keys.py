"""Room: the keys of DeepSpeed's JSON: which there are, which the run decides alone, which do nothing here. Pure.

As in DeepSpeed 0.19.8, of which nothing is imported: the command line reads such files where it is not installed. Tests hold
the tables against DeepSpeed's own models.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from worldsize.errors import ConfigError

AUTO = "auto"
ZERO = "zero_optimization"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_ALONE = "leave it out, or drive DeepSpeed in a program of its own"
_KEPT = "the run keeps checkpoints of its own: leave it out"
_GONE = "DeepSpeed has none any more: leave it out"
OURS = {
    "scheduler": "run.schedule makes the schedule: leave the section out",
    "data_efficiency": "the order of the data is the run's own: leave the section out",
    "curriculum_learning": "the order of the data is the run's own: leave the section out",
    "dataloader_drop_last": "the run deals the batches out, and drops none: leave it out",
    "gradient_allreduce_op": "losses carry their weights already: leave it out",
    "managed_gradient_accumulation": "the run says where a step ends: leave it out",
    "compile": "say compile= where the model is given to run.model",
    "nebula": _KEPT,
    "datastates": _KEPT,
    "datastates_ckpt": _KEPT,
    "elasticity": "the run itself goes on at any world size: leave it out",
    "autotuning": "start DeepSpeed's autotuner on a program of its own",
    "hybrid_engine": "it is no training engine: leave it out",
    "pipeline": "use the strategy with pp=",
    "tensor_parallel": "use the strategy with tp=",
    "sequence_parallel_size": "use the strategy with cp=",
    "data_parallel_size": "it follows from the ranks: leave it out",
    "expert_parallel": _ALONE,
    "use_data_before_expert_parallelism": _ALONE,
    "weight_quantization": _ALONE,
    "compression_training": _ALONE,
    "sparse_gradients": "the ranks sum whole gradients: leave it out",
    "amp": "use precision='bf16' or 'fp16'",
    f"{ZERO}.zenflow": _ALONE,
    f"{ZERO}.compute_grad_norm": "the run computes the norm once for both: leave it out",
    f"{ZERO}.legacy_stage1": _GONE,
    f"{ZERO}.mics_shard_size": "DeepSpeed has none any more: use the strategy 'hsdp', or leave it out",
    f"{ZERO}.mics_hierarchical_params_gather": _GONE,
    "fp16.fp16_master_weights_and_grads": "checkpoints keep what the optimizer computes in: leave it out",
}
"""Keys that the run decides alone, and what to do instead."""

_OFF = {
    "managed_gradient_accumulation": True, f"{ZERO}.compute_grad_norm": True, "gradient_allreduce_op": "mean",
    "sequence_parallel_size": 1, f"{ZERO}.mics_shard_size": -1,
}  # fmt: skip
"""What asks for nothing in them where that is not false."""

_TOP = {
    *BATCH, *(path for path in OURS if "." not in path), ZERO, "optimizer", "gradient_clipping", "fp16", "bf16",
    "torch_autocast", "data_types", "prescale_gradients", "gradient_predivide_factor", "communication_data_type",
    "disable_allgather", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "comms_logger",
    "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "dump_state", "steps_per_print", "log_level", "timers",
    "tensorboard", "wandb", "csv_monitor", "comet", "disable_python_gc", "seq_parallel_communication_data_type",
    "vocabulary_size", "activation_checkpointing", "checkpoint",
}  # fmt: skip
_FILES = {"enabled", "output_path", "job_name"}
_ON_DISK = {"nvme_path", "buffer_count"}
INSIDE: dict[str, set[str]] = {
    ZERO: {
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
        "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload",
        "cpu_offload_param", "cpu_offload_use_pin_memory", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
        "stage3_gather_fp16_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
        "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear",
        "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory", "leaf_module", "mics_shard_size", "mics_hierarchical_params_gather",
    },
    f"{ZERO}.offload_optimizer": {"device", "pin_memory", *_ON_DISK, "pipeline_read", "pipeline_write", "fast_init",
                                  "ratio", "super_offload", "cpuadam_cores_perc"},
    f"{ZERO}.offload_param": {"device", "pin_memory", *_ON_DISK, "buffer_size", "max_in_cpu"},
    f"{ZERO}.leaf_module": {"classes", "names", "name_suffixes"},
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
    "fp16": {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
             "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"},
    "bf16": {"enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
             "bf16_optimizer_states"},
    "torch_autocast": {"enabled", "dtype", "lower_precision_safe_modules"},
    "data_types": {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"},
    "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"},
    "activation_checkpointing": {"partition_activations", "number_checkpoints", "contiguous_memory_optimization",
                                 "synchronize_checkpoint_boundary", "profile", "cpu_checkpointing"},
    "checkpoint": {"tag_validation", "load_universal", "use_node_local_storage", "parallel_write",
                   "checkpoint_serialization", "writer"},
    "checkpoint.parallel_write": {"pipeline_stage"},
    "checkpoint.writer": {"type", "io_buffer_size", "io_buffer_double", "show_statistics", "data_parallel", "decoupled",
                          "io_multiplier"},
    "comms_logger": {"enabled", "prof_all", "prof_ops", "verbose", "debug"},
    "flops_profiler": {"enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed",
                       "output_file"},
    "timers": {"throughput"},
    "timers.throughput": {"enabled", "synchronized"},
    "tensorboard": _FILES,
    "csv_monitor": _FILES,
    "wandb": {"enabled", "group", "team", "project"},
    "comet": {"enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key",
              "online", "mode"},
}  # fmt: skip
"""The keys of each section that may stand in a file."""

_IDLE = (
    "activation_checkpointing", "aio", "checkpoint", "disable_allgather",
    "seq_parallel_communication_data_type", f"{ZERO}.allgather_partitions",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save", f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
    f"{ZERO}.load_from_fp32_weights", f"{ZERO}.elastic_checkpoint", f"{ZERO}.pipeline_loading_checkpoint",
    f"{ZERO}.cpu_offload_use_pin_memory", f"{ZERO}.save_muon_momentum_buffer_in_memory",
    *(f"{ZERO}.offload_optimizer.{name}" for name in (*sorted(_ON_DISK), "pipeline_read", "pipeline_write", "fast_init")),
    *(f"{ZERO}.offload_param.{name}" for name in (*sorted(_ON_DISK), "buffer_size", "max_in_cpu")),
)  # fmt: skip
"""Without effect under a run: of NVMe, which is refused, of DeepSpeed's own checkpoints and its own way to compute again
(`deepspeed.checkpointing`), or read by nobody in DeepSpeed."""

_AT_3 = (
    "offload_param", "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights",
    "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear", "leaf_module",
    "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "stage3_",
)  # fmt: skip
_AT_1_AND_2 = (
    "use_multi_rank_bucket_allreduce", "allgather_bucket_size", "round_robin_gradients", "parameter_alignment",
    "ignore_unused_parameters",
)  # fmt: skip


def refuse_unknown(values: Mapping[str, Any], *, top: bool = True) -> None:
    """Raises ConfigError where there is a key that DeepSpeed does not know; with its path and the nearest name.

    Args:
        values: the JSON.
        top: also where it stands in no section.
    """
    sections: list[tuple[str, Mapping[str, Any], set[str]]] = [("", values, _TOP)] if top else []
    for path, known in INSIDE.items():
        section = get(values, path)
        if isinstance(section, Mapping):
            sections.append((f"{path}.", section, known))
        elif section not in (None, AUTO) and not (section is False and path in OURS):
            raise ConfigError(f"DeepSpeed's JSON: {path} is a section", found=show(section), do="write an object")
    for prefix, section, known in sections:
        for key in section:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1, 0.4)
                do = f"did you mean {prefix}{near[0]}?" if near else "leave it out"
                raise ConfigError(f"DeepSpeed's JSON: {prefix}{key} is not known", do=do)


def refuse_ours(values: Mapping[str, Any], paths: Iterable[str] = OURS) -> None:
    """Raises ConfigError where there is a key that the run decides alone, and that asks for something."""
    for path in paths:
        if asks(path, found := get(values, path)):
            raise ConfigError(f"DeepSpeed's JSON: {path} contradicts the run", found=show(found), do=OURS[path])


def asks(path: str, value: Any) -> bool:
    """Whether a key says something: not where it is switched off, or left at `auto` as a whole.

    A type whose parameters are all at `auto`, as files for transformers have it, leaves the schedule to the run.
    """
    if value is None or value == AUTO or (value == _OFF[path] if path in _OFF else value is False):
        return False
    if not isinstance(value, Mapping):
        return True
    if not value or ("enabled" in value and value["enabled"] in (False, AUTO)):
        return False
    said = [each for name, each in leaves(value) if name != "type"]
    return not said or any(not (each is None or each is False or each == AUTO) for each in said)


def drop(values: dict[str, Any], paths: Iterable[str]) -> list[str]:
    """Take keys out. Returns those that named a type."""
    typed = []
    for path in paths:
        found = get(values, path)
        if isinstance(found, Mapping) and found.get("type", AUTO) != AUTO:
            typed.append(path)
        above, _, name = path.rpartition(".")
        section = get(values, above) if above else values
        if isinstance(section, dict):
            section.pop(name, None)
    return typed


def idle(values: Mapping[str, Any], stage: int) -> list[str]:
    """Paths of the keys that say something and have no effect at this stage."""
    zero = values.get(ZERO, {})
    beside = (_AT_3 if stage < 3 else ()) + (_AT_1_AND_2 if stage not in (1, 2) else ())  # noqa: PLR2004
    wrong = [f"{ZERO}.{name}" for name in zero if name.startswith(beside)] if beside else []
    return [path for path in dict.fromkeys((*_IDLE, *wrong)) if _says(path, get(values, path))]


def _says(path: str, value: Any) -> bool:
    return asks(path, value) if isinstance(value, Mapping) else value not in (None, AUTO)


def get(values: Mapping[str, Any], path: str) -> Any:
    """The value at a path of names with dots between; None where there is none."""
    found: Any = values
    for word in path.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All that is no section or list, with its path."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for at, value in enumerate(values):
            yield from leaves(value, f"{path}[{at}]")
    else:
        yield path, values


def show(value: Any) -> str:
    """A value as the file has it."""
    return json.dumps(value, default=str)
