"""Room: DeepSpeed's JSON against the run's own settings. Pure; nothing of DeepSpeed is imported.

What both say must agree. `auto` becomes what the run says. What only DeepSpeed knows goes to it unchanged; which keys there
are is in `keys`.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError
from worldsize.strategies.deepspeed import keys

if TYPE_CHECKING:
    from torch.optim import Optimizer

VARIABLE = "WORLDSIZE_DEEPSPEED_CONFIG"
"""Names a JSON file that wins over the program's."""

AUTO = keys.AUTO
_ZERO = keys.ZERO
_BATCH = keys.BATCH

_BY_WIDTH: dict[str, Callable[[int], int]] = {
    f"{_ZERO}.reduce_bucket_size": lambda width: width * width,
    f"{_ZERO}.stage3_prefetch_bucket_size": lambda width: width * width * 9 // 10,
    f"{_ZERO}.stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""What transformers makes of `auto` here, from the width of the model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the run says.

    Attributes:
        world: how many ranks there are.
        global_batch: samples of a step; 0 where nobody knows.
        micro_batch: samples of a forward pass; None where the loader will say it.
        precision: its name.
        clip: the largest norm of the gradients, None for any.
        stage: that of the strategy's name, None where the JSON says it.
        named: the strategy's name.
        optimizer: type and hyperparameters of the optimizer.
        hidden: width of the model, where it says it.
        device: cpu or cuda.
    """

    world: int
    global_batch: int = 0
    micro_batch: int | None = None
    precision: str = "fp32"
    clip: float | None = None
    stage: int | None = None
    named: str = "deepspeed"
    optimizer: tuple[str, Mapping[str, Any]] = ("", {})
    hidden: int | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Settled:
    """What DeepSpeed gets, its stage, and the paths of what was written without effect."""

    values: dict[str, Any]
    stage: int
    idle: list[str]


def read(given: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """The JSON as a dict of its own; None where there is none.

    Raises:
        ConfigError: the file is not there, or holds no JSON object, or a key twice.
    """
    if given is None or isinstance(given, Mapping):
        return None if given is None else copy.deepcopy(dict(given))
    path = Path(given)
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"DeepSpeed's JSON {path} cannot be read", found=error.strerror or str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON that DeepSpeed could use", found=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object", found=type(found).__name__)
    return found


def described(optimizer: Optimizer) -> tuple[str, dict[str, Any]]:
    """An optimizer's type, and the hyperparameters of its first group."""
    return type(optimizer).__name__, {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def settle(given: dict[str, Any] | None, asked: Asked) -> Settled:
    """DeepSpeed's JSON with everything in it that the run knows.

    Args:
        given: what the user wrote; None without one, which means stage 1.
        asked: what the run says.

    Raises:
        ConfigError: a key is unknown, contradicts the run, or is left at `auto`; with its path and both values.
    """
    first = {_ZERO: {"stage": 1}} if given is None and asked.stage is None else given or {}
    values: dict[str, Any] = copy.deepcopy(first)
    keys.refuse_unknown(values)
    keys.refuse_ours(values)
    idle = keys.drop(values, keys.OURS)
    keys.drop(values, [path for path in (*keys.INSIDE, "optimizer.params") if keys.get(values, path) in (None, AUTO)])
    stage = _stage(values, asked)
    idle += _loss_scale(values, asked)
    _settle_batch(values, asked)
    _settle_optimizer(values, asked)
    _agree(values, "gradient_clipping", asked.clip or 0.0, "clip= of run.optimizer")
    values["gradient_clipping"] = 0.0  # the run clips: exactly as everywhere else, and by counts that it alone knows
    _settle_precision(values, asked, stage)
    _settle_zero(values, asked)
    left = [path for path, value in keys.leaves(values) if value == AUTO]
    if left:
        raise ConfigError(
            "DeepSpeed's JSON leaves values at auto that the run does not know",
            found=", ".join(left), do="write numbers there, or leave the keys out",
        )  # fmt: skip
    values.setdefault("zero_force_ds_cpu_optimizer", False)
    return Settled(values, stage, [*idle, *keys.idle(values, stage)])


def batch(given: Mapping[str, Any], asked: Asked) -> tuple[int, int, int]:
    """Global batch, micro-batch and accumulation for DeepSpeed, whose product with the ranks is exact.

    Args:
        given: the JSON.
        asked: what the run says.

    Raises:
        ConfigError: the JSON's numbers do not multiply, or differ from the run's; with the keys and both values.
    """
    whole, micro, steps = (None if given.get(key) == AUTO else given.get(key) for key in _BATCH)
    for key, value in zip(_BATCH, (whole, micro, steps), strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"DeepSpeed's JSON: {key} counts", found=_show(value), do="give a number of 1 or more")
    product = [value for value in (micro, steps) if value is not None]
    if whole is not None and len(product) == 2 and whole != product[0] * product[1] * asked.world:  # noqa: PLR2004
        raise ConfigError(
            "DeepSpeed's JSON: train_batch_size is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks",
            found=f"{whole} and {micro} * {steps} * {asked.world} = {product[0] * product[1] * asked.world}",
            do="leave two of the three out: they follow from the run",
        )
    _same_batch("train_batch_size", whole, "global_batch", asked.global_batch or None)
    _same_batch("train_micro_batch_size_per_gpu", micro, "micro_batch", asked.micro_batch)
    size = micro or asked.micro_batch or 1
    whole = whole or asked.global_batch
    if steps is not None and whole and (micro or asked.micro_batch) and whole != size * steps * asked.world:
        raise ConfigError(
            "DeepSpeed's JSON: gradient_accumulation_steps contradicts the batch",
            found=f"gradient_accumulation_steps={steps}; global_batch {whole} = micro_batch {size} * {asked.world} ranks "
            f"* {whole / size / asked.world:g}",
            do="leave it out: it follows from the run",
        )
    often = max(1, -(-whole // (size * asked.world))) if whole else steps or 1
    return size * often * asked.world, size, often


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} twice")
    return dict(pairs)


def _stage(values: dict[str, Any], asked: Asked) -> int:
    zero = values.setdefault(_ZERO, {})
    said = zero.get("stage", AUTO)
    if asked.stage is not None:
        if said not in (AUTO, asked.stage):
            raise ConfigError(
                f"DeepSpeed's JSON: {_ZERO}.stage contradicts the strategy",
                found=f"stage {said}, strategy {asked.named!r}", do="leave the stage out, or choose strategy='deepspeed'",
            )  # fmt: skip
        said = asked.stage
    if said == AUTO and "stage" not in zero:
        said = 0
    if said != AUTO and (isinstance(said, bool) or said not in (0, 1, 2, 3)):
        raise ConfigError(f"DeepSpeed's JSON: {_ZERO}.stage", found=_show(said), do="choose 0, 1, 2 or 3")
    zero["stage"] = said
    return 0 if said == AUTO else int(said)


def _settle_batch(values: dict[str, Any], asked: Asked) -> None:
    values.update(zip(_BATCH, batch(values, asked), strict=True))


def _same_batch(key: str, value: int | None, ours: str, run: int | None) -> None:
    if value is None or value == run:
        return
    raise ConfigError(
        f"DeepSpeed's JSON: {key} contradicts the run", found=f"{key}={value}, {ours}={run}",
        do=f"leave it out, or give Run {ours}={value}",
    )  # fmt: skip


def _settle_optimizer(values: dict[str, Any], asked: Asked) -> None:
    """The run's optimizer is the one: a section may only say the same."""
    section = values.pop("optimizer", {})
    if all(value == AUTO for _, value in keys.leaves(section)):
        return
    kind, ours = asked.optimizer
    said = section.get("type", AUTO)
    if said != AUTO and said.lower() != kind.lower():
        _contradicts("optimizer.type", said, kind, "run.optimizer")
    for key, value in (section.get("params") or {}).items():
        if key == "torch_adam":
            if value not in (True, AUTO):
                _contradicts("optimizer.params.torch_adam", value, kind, "run.optimizer")
        elif key not in ours:
            near = difflib.get_close_matches(key, ours, 1, 0.4)
            raise ConfigError(
                f"DeepSpeed's JSON: optimizer.params.{key} is no setting of {kind}",
                do=f"did you mean {near[0]}?" if near else "leave it out",
            )
        elif value != AUTO and _plain(value) != _plain(ours[key]):
            _contradicts(f"optimizer.params.{key}", value, ours[key], "run.optimizer")


def _loss_scale(values: Mapping[str, Any], asked: Asked) -> list[str]:
    """What is said of it in vain: the run scales losses itself."""
    section = values.get("fp16", {}) if asked.precision == "fp16" else {}
    return [f"fp16.{name}" for name, value in section.items() if name != "enabled" and value not in (None, AUTO)]


def _settle_precision(values: dict[str, Any], asked: Asked, stage: int) -> None:
    low = asked.precision
    fp16, bf16, cast = (values.get(key, {}) for key in ("fp16", "bf16", "torch_autocast"))
    if fp16.get("enabled", False) not in (False, AUTO):
        do = "leave the section out: the run has a loss scale of its own" if low == "fp16" else "use precision='fp16'"
        raise ConfigError(
            "DeepSpeed's JSON: fp16.enabled contradicts the run", found=f"enabled, precision={low!r}", do=do
        )
    values.pop("fp16", None)  # the loss scale is the run's
    if bf16.get("enabled") == AUTO:
        bf16["enabled"] = low == "bf16" and stage > 0
    if bf16.get("enabled") and (low != "bf16" or not stage):
        _contradicts("bf16.enabled", f"true at stage {stage}", low, "precision= of the run, at a stage of 1 or more,")
    if not bf16.get("enabled"):
        values.pop("bf16", None)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(low)
    if cast.get("enabled") == AUTO:
        cast["enabled"] = low == "bf16"
    if cast.get("dtype") == AUTO:
        cast["dtype"] = dtype or "bfloat16"
    if cast.get("enabled") and (low != "bf16" or str(cast.get("dtype", "bfloat16")).rpartition(".")[2] != dtype):
        _contradicts("torch_autocast", cast.get("dtype", "enabled"), low, "precision= of the run")
    if low == "fp64":
        _settle_wide(values)


def _settle_wide(values: dict[str, Any]) -> None:
    for path in ("communication_data_type", "data_types"):
        if path in values:
            _contradicts(path, values[path], "fp64", "precision= of the run")
    # DeepSpeed scatters three dtypes only, and sums any.
    values[_ZERO]["reduce_scatter"] = False


def _settle_zero(values: dict[str, Any], asked: Asked) -> None:
    for path, number in _BY_WIDTH.items():
        if keys.get(values, path) == AUTO and asked.hidden is not None:
            values[_ZERO][path.rpartition(".")[2]] = number(asked.hidden)
    for part in ("offload_optimizer", "offload_param"):
        section = values[_ZERO].get(part) or {}
        if section.get("device") == "nvme":
            raise ConfigError(
                f"DeepSpeed's JSON: {_ZERO}.{part}.device nvme keeps state where checkpoints do not reach it",
                do="use cpu",
            )
    if values.get("steps_per_print") == AUTO:
        del values["steps_per_print"]


def _agree(values: Mapping[str, Any], path: str, ours: Any, where: str) -> None:
    said = keys.get(values, path)
    if said is not None and said not in (AUTO, ours):
        _contradicts(path, said, ours, where)


def _contradicts(path: str, said: Any, ours: Any, where: str) -> None:
    raise ConfigError(
        f"DeepSpeed's JSON: {path} contradicts {where}", found=f"{_show(said)} there, {_show(ours)} here",
        do="make them equal, or leave the key out",
    )  # fmt: skip


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return list(value) if isinstance(value, tuple) else value


def _show(value: Any) -> str:
    return keys.show(_plain(value))
