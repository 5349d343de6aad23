"""Room: beginning a run with weights from elsewhere: values only, by bare names; nothing of an optimizer or a position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worldsize.checkpoint import weights
from worldsize.errors import CheckpointError
from worldsize.runtime.sharded import is_sharded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from worldsize.train.parts import Placed


def read(source: Path, model: str, module: nn.Module, *, strict: bool, trust: bool) -> dict[str, Tensor]:
    """Weights for one model, by its bare names.

    Args:
        source: whatever `checkpoint.weights.read_weights` understands.
        model: the model's name in the run: of a checkpoint of ours, its part is taken.
        module: the placed model.
        strict: names must fit, with the prefixes of wrappers taken off.
        trust: allow unpickling.
    """
    found = weights.read_weights(source, trust=trust)
    own = {name.removeprefix(f"{model}/"): each for name, each in found.items() if name.startswith(f"{model}/")}
    if own or not strict:
        return own or found
    return weights.fitting(source, found, module.state_dict().keys())


def fill(placed: Placed, values: Mapping[str, Tensor], *, strict: bool = True) -> list[str]:
    """Copy weights into a placed model, each rank its own part. Collective.

    Args:
        placed: a model.
        values: whole tensors by the bare model's names.
        strict: refuse names that only one side has.

    Returns:
        names that stayed as they were.

    Raises:
        CheckpointError: names or shapes do not fit, with counts and examples.
    """
    live = placed.strategy.state(placed.module)
    missing, foreign = sorted(live.keys() - values.keys()), sorted(values.keys() - live.keys())
    if strict and (missing or foreign):
        raise CheckpointError(
            "these weights are not of this model",
            found=f"{len(missing)} names missing {missing[:3]}, {len(foreign)} unknown {foreign[:3]}",
            do="rename them, or strict=False to take what fits",
        )
    with torch.no_grad():
        for name in live.keys() & values.keys():
            _copy(name, live[name], values[name])
    placed.strategy.filled(placed.module, live)
    return missing


def _copy(name: str, live: Tensor, whole: Tensor) -> None:
    if live.shape != whole.shape:
        raise CheckpointError(
            f"{name}: shapes differ", found=f"model {tuple(live.shape)}, weights {tuple(whole.shape)}"
        )
    if is_sharded(live):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(
            whole.to(device=live.device, dtype=live.dtype), live.device_mesh, live.placements, src_data_rank=None
        )
    live.copy_(whole)
