"""Room: a checkpoint as the universal one that DeepSpeed loads (`checkpoint.load_universal`), at any ZeRO stage and world size.

A folder a parameter: its float32 values and what the optimizer keeps of it, a file each. The layout is that of
DeepSpeed 0.19 (`deepspeed/checkpoint/ds_to_universal.py`); nothing of DeepSpeed is imported. DeepSpeed restores no
buffers and no frozen parameters from it: they lie under `module` in the file of model states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from worldsize.checkpoint import disk
from worldsize.checkpoint.export import Weights, beside, optimizer_of, plain_group, recorder
from worldsize.checkpoint.skeleton import unpack
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

LATEST = "latest_universal"
_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout it is; DeepSpeed asks whether it is new enough."""
_PARAM, _VALUES, _STEP = "param", "fp32", "step"


def deepspeed(weights: Weights, target: Path) -> Path:
    """Write a universal checkpoint, one tensor in memory at a time.

    Args:
        weights: of one model.
        target: a folder for `engine.load_checkpoint(target)`; it gets `latest_universal` and a folder of the step.

    Raises:
        CheckpointError: the target is there already, the disk says no, or DeepSpeed could not hold the state.
        ConfigError: the model has no optimizer of its own, or several.
    """
    name, saved = optimizer_of(weights)
    tag = weights.opened.path.name
    with beside(target) as root:
        zero = root / tag / "zero"
        zero.mkdir(parents=True)
        steps = [_group(weights, name, saved, group, zero) for group in saved["groups"]]
        groups = [plain_group(group) | {"params": []} for group in saved["groups"]]
        # Stage 3 looks for both one level deeper than stages 1 and 2.
        inner = {"state": {0: {_STEP: steps[0]}}, "param_groups": groups}
        _save(zero / "optimizer_state.pt", {
            "param_groups": groups, "optimizer_state_dict": inner, "ds_version": _VERSION, "overflow": False,
        })  # fmt: skip
        states = _model_states(weights, saved)
        for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            _save(root / tag / file, states)
        disk.write(root / LATEST, tag)
    return target


def _group(weights: Weights, optimizer: str, saved: dict[str, Any], group: dict[str, Any], zero: Path) -> Tensor:
    """Write the parameters of one group. Returns the steps that its optimizer made: one number for all of them."""
    slots: dict[str, dict[str, Any]] = {}
    for parameter in group["params"]:
        slot = unpack(saved["slots"].get(parameter, {"pairs": []}), lambda path: path)
        slots[parameter] = dict(_states(weights, optimizer, parameter, slot))
    step = _step(weights, slots)
    keys = {key for slot in slots.values() for key in slot if key != _STEP}
    for parameter, slot in slots.items():
        name = parameter.removeprefix(f"{weights.model}.")
        folder = zero / name
        folder.mkdir()
        values = weights.opened.tensor(weights.own[name]).float()
        _save(folder / f"{_VALUES}.pt", {_PARAM: values})
        _save(folder / f"{_STEP}.pt", step)
        for key in keys:
            # A parameter that had no gradient yet has no state; DeepSpeed keeps zeros for it.
            kept = weights.opened.tensor(slot[key]).float() if key in slot else torch.zeros_like(values)
            _save(folder / f"{key}.pt", {_PARAM: kept})
    return step


def _step(weights: Weights, slots: dict[str, dict[str, Any]]) -> Tensor:
    steps = {float(slot[_STEP]) for slot in slots.values() if _STEP in slot} or {float(weights.opened.manifest.step)}
    if len(steps) > 1:
        raise CheckpointError(
            "DeepSpeed keeps one number of steps for all parameters of a group", found=f"steps {sorted(steps)}",
            do="export the weights alone",
        )  # fmt: skip
    return torch.tensor(steps.pop())


def _states(weights: Weights, optimizer: str, parameter: str, slot: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The state of a parameter: the step, and the names of the tensors that are shaped like it."""
    shape = weights.opened.facts[weights.own[parameter.removeprefix(f"{weights.model}.")]].shape
    for key, value in slot.items():
        name = f"optim/{optimizer}/{value}"
        if key == _STEP:
            yield key, weights.opened.tensor(name) if isinstance(value, str) else value
        elif isinstance(value, str) and name in weights.opened.facts and weights.opened.facts[name].shape == shape:
            yield key, name
        elif value is not None:
            raise CheckpointError(
                f"DeepSpeed's universal checkpoint has no place for {key!r} of {parameter}", found=str(value),
                do="export the weights alone",
            )  # fmt: skip


def _model_states(weights: Weights, saved: dict[str, Any]) -> dict[str, Any]:
    trained = {name.removeprefix(f"{weights.model}.") for group in saved["groups"] for name in group["params"]}
    manifest, schedules = weights.opened.manifest, weights.opened.train["schedules"]
    return {
        "module": {name: weights.tensor(name) for name in weights.own if name not in trained},
        "lr_scheduler": unpack(schedules[0], weights.opened.tensor) if len(schedules) == 1 else None,
        "global_steps": manifest.step,
        "global_samples": manifest.samples,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _VERSION,
    }


def _save(path: Path, value: Any) -> None:
    with recorder(path) as file:
        torch.save(value, cast("Any", file))
