"""Room: DeepSpeed's JSON as settings of a training: what it says of batch, optimizer, schedule, clipping, precision and ZeRO.

On whole models DeepSpeed itself gets the rest of the file. A pipeline and tensor parallel are ours: there the settings are
taken, a stage becomes the strategy that shards as much, and what has no counterpart is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError
from worldsize.strategies.deepspeed import config as jsons

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worldsize.recipes.llm.config import LLMConfig

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = ("adam", "adamw")
_PLAIN = {
    "gradient_clipping": "clip",
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
}
_TAKEN = {*_PLAIN, "gradient_accumulation_steps", "optimizer", "scheduler", "fp16", "bf16", "zero_optimization"}


@dataclass(frozen=True, slots=True)
class Taken:
    """What a file says.

    Attributes:
        settings: ours.
        rest: for DeepSpeed itself; None where it takes no part.
        unused: keys that have no counterpart.
    """

    settings: dict[str, Any]
    rest: dict[str, Any] | None
    unused: list[str]


def apply(config: LLMConfig, ranks: int) -> tuple[LLMConfig, Taken]:
    """The settings with those of `deepspeed_config` in them.

    Args:
        config: as they were given; the file is named in it.
        ranks: how many there are in all.

    Raises:
        ConfigError: the file cannot be read, or says otherwise than what was given; with both values.
    """
    found = jsons.read(config.deepspeed_config)
    assert found is not None
    parts = config.pipe_parallel_size * config.model_parallel_size
    shares, rest = divmod(ranks, parts)
    if rest:
        raise ConfigError(
            "ranks are no multiple of pipe_parallel_size * model_parallel_size", found=f"{ranks} ranks, {parts} parts"
        )
    settings = _batch(found, shares) | _optimizer(found) | _schedule(found) | _precision(found)
    own = parts > 1 or config.context_parallel_size > 1
    settings |= _sharding(found) if own else {"strategy": "deepspeed"}
    for name, value in settings.items():
        said = getattr(config, name)
        if name in config.model_fields_set and said != value:
            raise ConfigError(
                f"{config.deepspeed_config} contradicts --{name}",
                found=f"{value} there, {said} here",
                do="make them equal",
            )
    made = type(config).of({**config.model_dump(exclude_unset=True), **settings})
    unused = sorted(_unused(found)) if own else []
    return made, Taken(settings, None if own else _for_deepspeed(found), unused)


def _known(section: Mapping[str, Any], name: str) -> Any:
    """A value, unless it is left open."""
    value = section.get(name)
    return None if value == jsons.AUTO else value


def _batch(found: Mapping[str, Any], shares: int) -> dict[str, Any]:
    settings = {ours: value for name, ours in _PLAIN.items() if (value := _known(found, name)) is not None}
    often = _known(found, "gradient_accumulation_steps")
    if often is not None and "micro_batch" in settings:
        product = often * settings["micro_batch"] * shares
        if settings.setdefault("global_batch", product) != product:
            raise ConfigError(
                "DeepSpeed's JSON: train_batch_size is not micro-batch * accumulation * shares of the batch",
                found=f"{settings['global_batch']} and {settings['micro_batch']} * {often} * {shares} = {product}",
                do="leave gradient_accumulation_steps out: it follows",
            )
    return settings


def _optimizer(found: Mapping[str, Any]) -> dict[str, Any]:
    section = found.get("optimizer") or {}
    kind = _known(section, "type")
    if kind is not None and kind.lower() not in _OPTIMIZERS:
        raise ConfigError(
            "the recipe trains with AdamW", found=f"optimizer.type {kind}", do="write AdamW, or copy the recipe"
        )
    given = section.get("params") or {}
    settings = {name: value for name in ("lr", "weight_decay") if (value := _known(given, name)) is not None}
    if (betas := _known(given, "betas")) is not None:
        settings["beta1"], settings["beta2"] = betas
    return settings


def _schedule(found: Mapping[str, Any]) -> dict[str, Any]:
    section = found.get("scheduler") or {}
    kind = _known(section, "type")
    if kind is None:
        return {}
    if kind not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        raise ConfigError(
            "DeepSpeed's JSON: a schedule that the recipe does not have", found=kind, do=f"choose one of {known}"
        )
    given = section.get("params") or {}
    settings: dict[str, Any] = {"lr_schedule": _SCHEDULES[kind]}
    if (warm := _known(given, "warmup_num_steps")) is not None:
        settings["warmup_steps"] = warm
    if (highest := _known(given, "warmup_max_lr")) is not None:
        settings["lr"] = highest
    if kind != "WarmupLR":
        settings["min_lr_share"] = float(_known(given, "cos_min_ratio") or 0.0)
    return settings


def _precision(found: Mapping[str, Any]) -> dict[str, Any]:
    low = [name for name in ("bf16", "fp16") if _known(found.get(name) or {}, "enabled")]
    return {"precision": low[0]} if low else {}


def _sharding(found: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy of ours that shards at least as much as the stage."""
    stage = _known(found.get("zero_optimization") or {}, "stage") or 0
    return {"strategy": "fsdp" if stage else "ddp"}


def _unused(found: Mapping[str, Any]) -> list[str]:
    zero = found.get("zero_optimization") or {}
    inside = [f"zero_optimization.{name}" for name in zero if name != "stage"]
    return [*(name for name in found if name not in _TAKEN), *inside]


def _for_deepspeed(found: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed gets: without what the run decides, and without the schedule, which is the run's."""
    return {name: value for name, value in found.items() if name not in ("scheduler", "optimizer", "fp16")}
