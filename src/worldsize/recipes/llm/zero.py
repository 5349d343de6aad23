"""Room: DeepSpeed's JSON as settings of a training: what it says of batch, optimizer, schedule, clipping, precision and ZeRO.

On whole models DeepSpeed itself gets the rest of the file. A pipeline and tensor parallel are ours: there the settings are
taken, and a stage becomes the strategy that shards as much. Each key is taken, handed on, named as without effect, or refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError
from worldsize.recipes.llm import fp8, modes
from worldsize.strategies.deepspeed import config as jsons
from worldsize.strategies.deepspeed import keys

if TYPE_CHECKING:
    from worldsize.recipes.llm.config import LLMConfig

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_RISE = {"warmup_num_steps": 1000, "warmup_type": "log"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "WarmupLR": {**_RISE, "warmup_min_lr": 0.0, "warmup_max_lr": jsons.AUTO},
    "WarmupDecayLR": {**_RISE, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "total_num_steps": jsons.AUTO},
    "WarmupCosineLR": {**_RISE, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, "total_num_steps": jsons.AUTO},
}
"""The parameters of each schedule, and what DeepSpeed takes for one that the file leaves out; auto: what the flags say."""
_CURVE = {
    "warmup_num_steps": "warmup_steps", "warmup_type": "warmup_shape", "warmup_max_lr": "lr",
    "total_num_steps": "train_steps", "warmup_min_ratio": "warmup_min_share", "cos_min_ratio": "min_lr_share",
}  # fmt: skip
_OPTIMIZERS = (
    "adam",
    "adamw",
)  # one and the same: DeepSpeed's "Adam" is AdamW too, unless adam_w_mode says otherwise
_ADAMW = ("lr", "weight_decay", "eps")
_FIXED = {
    "adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False, "torch_adam": True, "max_grad_norm": 0,
}  # fmt: skip
"""What the recipe's AdamW does, where a file may say it too."""
_HOW = ("fused", "foreach", "capturable", "differentiable", "set_grad_none")
_PLAIN = {
    "gradient_clipping": "clip",
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
}
_SIZES = ("global_batch", "micro_batch")
_LOW = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
_TAKEN = {
    "zero_optimization": ("stage",), "fp16": ("enabled",), "bf16": ("enabled",), "torch_autocast": ("enabled", "dtype"),
}  # fmt: skip
"""What is taken of each of these sections."""
_WHOLE = {*_PLAIN, "gradient_accumulation_steps", "optimizer", "scheduler"}


@dataclass(frozen=True, slots=True)
class Taken:
    """What a file says.

    Attributes:
        settings: ours.
        rest: for DeepSpeed itself; None where it takes no part.
        unused: keys that have no counterpart.
        notes: lines for the user: these keys, and where DeepSpeed alone would take the file otherwise.
    """

    settings: dict[str, Any]
    rest: dict[str, Any] | None
    unused: list[str]
    notes: list[str]


def apply(config: LLMConfig, ranks: int) -> tuple[LLMConfig, Taken]:
    """The settings with those of `deepspeed_config` in them.

    Args:
        config: as they were given; the file is named in it.
        ranks: how many there are in all.

    Raises:
        ConfigError: the file cannot be read, has a key that nobody knows, or says otherwise than what was given, or what
            cannot be done; with both values.
    """
    found = jsons.read(config.deepspeed_config)
    assert found is not None
    own = config.pipe_parallel_size * config.model_parallel_size * config.context_parallel_size > 1
    keys.refuse_unknown(found, top=not own)  # beside the sections such files have keys of other programs, named below
    keys.refuse_ours(found, ["fp16.fp16_master_weights_and_grads"])
    settings = _batch(found, config, ranks) | _optimizer(found) | _precision(found, config)
    curve, silent = _schedule(found, config, settings)
    settings |= curve
    settings |= _sharding(found) if own else {"strategy": "deepspeed"}
    _agree(config, settings)
    defaults = {
        name: value for name, value in silent.items() if name not in config.model_fields_set | settings.keys()
    }
    made = type(config).of({**config.model_dump(exclude_unset=True), **defaults, **settings})
    unused = _unused(found, made, own=own)
    notes = [f"{config.deepspeed_config}: {told}" for told in _rates(found)]
    notes += [f"of {config.deepspeed_config} without effect here: {', '.join(unused)}"] if unused else []
    if "precision" not in made.model_fields_set:
        # DeepSpeed alone would take fp32, but such files come from programs that say the precision themselves, as this one.
        notes.append(f"{config.deepspeed_config} says nothing of precision: {made.precision}, as without a file")
    return made, Taken(settings | defaults, None if own else _for_deepspeed(found), unused, notes)


def _section(found: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A section; an empty one where it is left open or not there. Raises ConfigError where something else is."""
    section = keys.get(found, ".".join(path))
    if isinstance(section, Mapping):
        return section
    if section in (None, jsons.AUTO) or isinstance(section, bool):
        return {}
    raise ConfigError(
        f"DeepSpeed's JSON: {'.'.join(path)} is a section",
        found=keys.show(section),
        do="write {...}, or leave it out",
    )


def _known(section: Mapping[str, Any], name: str) -> Any:
    """A value, unless it is left open."""
    value = section.get(name)
    return None if value == jsons.AUTO else value


def _agree(config: LLMConfig, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        said = getattr(config, name)
        if name in config.model_fields_set and said != getattr(type(config).of({name: value}), name):
            raise ConfigError(
                f"{config.deepspeed_config} contradicts --{name}",
                found=f"{value} there, {said} here",
                do="make them equal",
            )
    if "train_steps" in settings and config.epochs is not None:
        raise ConfigError(
            f"{config.deepspeed_config} contradicts --epochs",
            found=f"scheduler.params.total_num_steps {settings['train_steps']} there, {config.epochs:g} epochs here",
            do="give steps alone, or leave total_num_steps at auto",
        )


def _batch(found: Mapping[str, Any], config: LLMConfig, ranks: int) -> dict[str, Any]:
    parts = config.pipe_parallel_size * config.model_parallel_size * config.context_parallel_size
    shares, rest = divmod(ranks, parts)
    if rest:
        raise ConfigError(
            "ranks are no multiple of pipe_parallel_size * model_parallel_size * context_parallel_size",
            found=f"{ranks} ranks, {parts} parts",
        )
    settings = {ours: value for name, ours in _PLAIN.items() if (value := _known(found, name)) is not None}
    given = {name: getattr(config, name) for name in _SIZES if name in config.model_fields_set}
    sizes = {name: size for name, size in given.items() if size != modes.AUTO}
    sizes |= {name: settings[name] for name in _SIZES if name in settings}
    often = _known(found, "gradient_accumulation_steps")
    for size in (often, *sizes.values()):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(
                "the numbers of a batch count, where DeepSpeed's JSON says them",
                found=repr(size),
                do="give whole numbers",
            )
    if often is not None:
        return settings | _accumulated(often, sizes, config, shares)
    silent = "train_batch_size" not in found and "gradient_accumulation_steps" not in found
    if silent and "micro_batch" in settings and "global_batch" not in sizes:
        settings["global_batch"] = settings["micro_batch"] * shares  # DeepSpeed accumulates where it is told to
    return settings


def _accumulated(often: int, sizes: Mapping[str, Any], config: LLMConfig, shares: int) -> dict[str, int]:
    """What follows from how often a rank accumulates."""
    whole, micro = sizes.get("global_batch"), sizes.get("micro_batch")
    if whole is not None and micro is None:
        micro, rest = divmod(whole, often * shares)
        if rest or not micro:
            raise ConfigError(
                "DeepSpeed's JSON: train_batch_size is no multiple of accumulation * shares of the batch",
                found=f"{whole} and {often} * {shares} = {often * shares}",
                do="leave gradient_accumulation_steps out: it follows",
            )
        return {"micro_batch": micro}
    micro = micro or config.micro_batch
    if not isinstance(micro, int):
        raise ConfigError(
            "DeepSpeed's JSON: gradient_accumulation_steps needs a micro-batch", found=f"--micro_batch {micro}",
            do="give a number, or leave gradient_accumulation_steps out",
        )  # fmt: skip
    product = often * micro * shares
    if whole not in (None, product):
        raise ConfigError(
            "DeepSpeed's JSON: train_batch_size is not micro-batch * accumulation * shares of the batch",
            found=f"{whole} and {micro} * {often} * {shares} = {product}",
            do="leave gradient_accumulation_steps out: it follows",
        )
    return {"global_batch": product}


def _optimizer(found: Mapping[str, Any]) -> dict[str, Any]:
    kind = _known(_section(found, "optimizer"), "type")
    if kind is not None and str(kind).lower() not in _OPTIMIZERS:
        raise ConfigError(
            "the recipe trains with AdamW", found=f"optimizer.type {kind}", do="write AdamW, or copy the recipe"
        )
    given = _section(found, "optimizer", "params")
    _refuse_others("optimizer.params", given, (*_ADAMW, "betas", *_FIXED, *_HOW))
    for name, ours in _FIXED.items():
        if (value := _known(given, name)) not in (None, ours):
            raise ConfigError(
                f"DeepSpeed's JSON: optimizer.params.{name} is not what the recipe trains with",
                found=f"{keys.show(value)} there, {keys.show(ours)} here",
                do="say gradient_clipping" if name == "max_grad_norm" else "leave it out, or copy the recipe",
            )
    settings = {name: value for name in _ADAMW if (value := _known(given, name)) is not None}
    if (betas := _known(given, "betas")) is not None:
        if not isinstance(betas, list) or len(betas) != 2:  # noqa: PLR2004
            raise ConfigError("DeepSpeed's JSON: optimizer.params.betas are two numbers", found=keys.show(betas))
        settings["beta1"], settings["beta2"] = betas
    return settings


def _refuse_others(path: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.4)
            do = f"did you mean {near[0]}?" if near else "leave it out"
            raise ConfigError(f"DeepSpeed's JSON: {path}.{name} is not known", do=do)


def _schedule(
    found: Mapping[str, Any], config: LLMConfig, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says of it, and what DeepSpeed takes for what it leaves out."""
    kind, given = _known(_section(found, "scheduler"), "type"), _section(found, "scheduler", "params")
    if kind is None:
        if any(_known(given, name) is not None for name in given):
            raise ConfigError(
                "DeepSpeed's JSON: scheduler.params without scheduler.type", do="say which schedule it is"
            )
        return {}, {}
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        raise ConfigError(
            "DeepSpeed's JSON: a schedule that the recipe does not have", found=str(kind), do=f"choose one of {known}"
        )
    first = (
        {"last_batch_iteration"} if given.get("last_batch_iteration") in (-1, jsons.AUTO) else set()
    )  # from the start
    _refuse_others("scheduler.params", given, _DEFAULTS[kind].keys() | first)
    said: dict[str, Any] = {"lr_schedule": _SCHEDULES[kind]}
    silent: dict[str, Any] = {}
    if kind == "WarmupDecayLR":
        said["min_lr_share"] = 0.0
    for name, default in _DEFAULTS[kind].items():
        value = _known({name: given.get(name, default)}, name)
        if name in _CURVE and value is not None:
            (said if name in given else silent)[_CURVE[name]] = value
    flag = {"lr": config.lr} if "lr" in config.model_fields_set else {}
    _rise_from(_known(given, "warmup_min_lr"), said, {"lr": config.lr, **silent, **flag, **settings, **said}["lr"])
    return said, silent


def _rates(found: Mapping[str, Any]) -> list[str]:
    """What is to be said where optimizer and schedule have different ones: DeepSpeed's schedule wins without a word."""
    rate = _known(_section(found, "optimizer", "params"), "lr")
    given, kind = _section(found, "scheduler", "params"), _known(_section(found, "scheduler"), "type")
    highest = {**_DEFAULTS.get(kind, {}), **given}.get("warmup_max_lr", jsons.AUTO)
    if rate is None or highest in (jsons.AUTO, rate):
        return []
    if "warmup_max_lr" in given:
        return [f"optimizer.params.lr {rate} gives way to scheduler.params.warmup_max_lr {highest}, as by DeepSpeed"]
    return [
        f"the rate rises to optimizer.params.lr {rate}; DeepSpeed alone would go to {highest}, the default of {kind}"
    ]


def _rise_from(least: Any, said: dict[str, Any], highest: Any) -> None:
    """The lowest rate as a share of the highest."""
    if least is None:
        return
    if not isinstance(least, int | float) or not isinstance(highest, int | float) or not 0 <= least <= highest:
        raise ConfigError(
            "DeepSpeed's JSON: scheduler.params.warmup_min_lr lies between 0 and the highest rate",
            found=f"{keys.show(least)} and {keys.show(highest)}", do="give one number for all parameters",
        )  # fmt: skip
    said["warmup_min_share"] = least / highest if least else 0.0


def _precision(found: Mapping[str, Any], config: LLMConfig) -> dict[str, Any]:
    """What is switched on; where one is switched off and the other is not left open, what was given, else fp32."""
    states = {name: _switch(found, name) for name in ("bf16", "fp16")}
    low = {name for name, state in states.items() if state is True}
    cast = _section(found, "torch_autocast")
    if _switch(found, "torch_autocast") is True:
        low.add(_LOW.get(str(_known(cast, "dtype") or "bf16").rpartition(".")[2], "torch_autocast"))
    if len(low) > 1 or "torch_autocast" in low:
        raise ConfigError(
            "DeepSpeed's JSON says several precisions, or one that the recipe does not have",
            found=keys.show({name: found[name] for name in ("bf16", "fp16", "torch_autocast") if name in found}),
            do="enable bf16 or fp16",
        )
    if low:
        return {"precision": low.pop()}
    off = {name for name, state in states.items() if state is False}
    computed = "bf16" if config.precision == fp8.NAME else config.precision
    if not off or jsons.AUTO in states.values() or ("precision" in config.model_fields_set and computed not in off):
        return {}
    return {"precision": "fp32"}


def _switch(found: Mapping[str, Any], name: str) -> bool | str | None:
    """Whether a section is on; `auto` where it is left open."""
    state: bool | str | None = _section(found, name).get("enabled")
    if isinstance(state, bool) or state in (None, jsons.AUTO):
        return state
    raise ConfigError(f"DeepSpeed's JSON: {name}.enabled is true, false or auto", found=keys.show(state))


def _sharding(found: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy of ours that shards at least as much as the stage."""
    stage = _known(_section(found, "zero_optimization"), "stage") or int(found.get("zero_optimization") is True)
    if stage not in range(4):
        raise ConfigError("DeepSpeed's JSON: zero_optimization.stage is 0, 1, 2 or 3", found=keys.show(stage))
    return {"strategy": "fsdp" if stage else "ddp"}


def _unused(found: Mapping[str, Any], made: LLMConfig, *, own: bool) -> list[str]:
    """Paths of what is neither taken nor handed on."""
    paths = [f"optimizer.params.{name}" for name in _HOW] + ["optimizer.legacy_fusion"]
    if own:
        paths += [
            name for name, value in found.items() if name not in _WHOLE | _TAKEN.keys() and keys.asks(name, value)
        ]
    for name in _TAKEN if own else ("fp16",):
        if name in ("zero_optimization", made.precision) or _known(_section(found, name), "enabled"):
            paths += [f"{name}.{each}" for each in _section(found, name) if each not in _TAKEN[name]]
    return sorted(path for path in paths if keys.get(found, path) not in (None, jsons.AUTO))


def _for_deepspeed(found: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed gets: without what the run decides, and without the schedule, which is the run's."""
    return {name: value for name, value in found.items() if name not in ("scheduler", "optimizer", "fp16")}
