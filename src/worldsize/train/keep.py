"""Room: the user's own state in checkpoints: what `Run.keep` accepts, and how it comes back.

Kept state is replicated: the same on every rank. Digests are compared at each save, so that a counter that went its
own way on one rank is named then, not found after a resume.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import CheckpointError, StepError
from worldsize.runtime.sharded import is_sharded
from worldsize.train.plain import empty, join, split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from worldsize.runtime.comm import Comm
    from worldsize.runtime.stretch import Stretch


class Kept:
    """The kept objects as attributes: `kept = run.keep(seen=0); kept.seen += 1`."""

    def __init__(self) -> None:
        object.__setattr__(self, "_objects", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._objects:
            raise AttributeError(name)
        return self._objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._objects:
            raise StepError(f"{name!r} is not kept", do=f"run.keep({name}=...) first")
        split(value if not hasattr(value, "state_dict") else None, name, {})
        self._objects[name] = value

    def add(self, objects: Mapping[str, Any]) -> None:
        """Accept objects. Raises ConfigError where one could not be loaded safely, now and not at the first save."""
        for name, value in objects.items():
            if name in self._objects:
                raise StepError(f"{name!r} is kept already")
            split(_state(value), name, {})
            self._objects[name] = value

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and the skeleton of each object."""
        tensors: dict[str, Tensor] = {}
        return tensors, {name: split(_state(value), name, tensors) for name, value in self._objects.items()}

    def wanted(self, skeletons: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Empty tensors for what a checkpoint holds. Raises CheckpointError where other names are kept now."""
        if set(skeletons) != set(self._objects):
            raise CheckpointError(
                "what this run keeps is not what the checkpoint holds",
                found=f"now {sorted(self._objects)}, in the checkpoint {sorted(skeletons)}",
                do="call run.keep as in the run that wrote it",
            )
        found = {name: tensor for skeleton in skeletons.values() for name, tensor in empty(skeleton, device).items()}
        sharded = {name: torch.empty_like(each) for name, each in self._objects.items() if is_sharded(each)}
        return found | {name: tensor for name, tensor in sharded.items() if name in found}

    def load(self, tensors: Mapping[str, Tensor | Stretch], skeletons: Mapping[str, Any]) -> None:
        """Put every object back, in place where it can be."""
        for name, skeleton in skeletons.items():
            self._objects[name] = _restore(self._objects[name], join(skeleton, tensors))

    def refuse_differences(self, comm: Comm) -> None:
        """Compare digests over ranks. Raises StepError naming what differs."""
        ranks = comm.gather({name: _digest(_state(value)) for name, value in self._objects.items()})
        for name in self._objects:
            digests = [rank.get(name) for rank in ranks]
            if len(set(digests)) > 1:
                odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
                raise StepError(
                    f"kept {name!r} is not the same on every rank",
                    found=f"ranks {odd} differ from rank 0",
                    do="reduce it over ranks before keeping it (step.log and run.evaluate do)",
                )


def _state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


def _restore(value: Any, state: Any) -> Any:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(state)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(state)
    elif isinstance(value, dict):
        value.clear()
        value.update(state)
    elif isinstance(value, list):
        value[:] = state
    else:
        return state
    return value


def _digest(state: Any) -> str:
    tensors: dict[str, Tensor] = {}
    plain = split(state, "", tensors)
    found = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        if is_sharded(tensors[name]):
            continue  # each rank holds another part of it
        found.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
