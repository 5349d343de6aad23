"""Room: weights from elsewhere as something to fill tensors from: each rank reads its part where the files allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from worldsize.checkpoint import disk, load, safe, weights
from worldsize.checkpoint.facts import TensorFact
from worldsize.errors import CheckpointError
from worldsize.runtime.sharded import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


class Weights(Protocol):
    """Tensors by name, not yet read."""

    @property
    def facts(self) -> Mapping[str, TensorFact]:
        """What each is."""
        ...

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy tensors into others of the same shape: whole ones or parts (DTensor), of any dtype, on any device.

        Raises:
            CheckpointError: shapes differ, or reading failed.
        """
        ...


class Held:
    """Whole tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.facts = {name: TensorFact(tuple(value.shape), value.dtype) for name, value in tensors.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """See `Weights`."""
        refuse_shapes(self.facts, targets)
        with torch.no_grad():
            for name, target in targets.items():
                _copy(self._tensors[name], target)


class Boxes:
    """Safetensors files."""

    def __init__(self, path: Path) -> None:
        self._path, self._places = path, safe.places(path)
        self.facts = {name: place.fact for name, place in self._places.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """See `Weights`."""
        from worldsize.checkpoint import store

        refuse_shapes(self.facts, targets)
        try:
            # Tied names lie in one place, which DCP would read once.
            for name, target in targets.items():
                store.read(self._path.parent, store.of_places({name: self._places[name]}), {name: target}, bare=True)
        except OSError as error:
            raise disk.explain(error, "reading", self._path) from error


class Ours:
    """The models' part of a checkpoint of ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = load.metadata(path).items()
        self.facts = {
            name.removeprefix(weights.MODEL): fact for name, fact in found if name.startswith(weights.MODEL)
        }

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """See `Weights`."""
        load.load_some(
            self._path, {f"{weights.MODEL}{name}": target for name, target in targets.items()}, convert=True
        )


def open_weights(path: Path, *, trust: bool = False, say: Callable[[str], None] = lambda _: None) -> Weights:
    """Weights in whatever `weights.read_weights` understands. Says and raises as that."""
    ours = weights.ours(path)
    if ours is not None:
        return Ours(ours)
    file = weights.file_in(path) if path.is_dir() else path
    if file is not None and file.name.endswith((safe.SUFFIX, f"{safe.SUFFIX}.index.json")):
        return Boxes(file)
    return Held(weights.read_weights(path, trust=trust, say=say))


def refuse_shapes(facts: Mapping[str, TensorFact], targets: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where a target has another shape than what it is filled from."""
    for name, target in targets.items():
        if tuple(target.shape) != facts[name].shape:
            raise CheckpointError(
                f"{name}: shapes differ", found=f"model {tuple(target.shape)}, weights {facts[name].shape}"
            )


def _copy(whole: Tensor, target: Tensor) -> None:
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(
            whole.to(device=target.device, dtype=target.dtype),
            target.device_mesh,
            target.placements,
            src_data_rank=None,
        )
    target.copy_(whole)
