"""Room: a checkpoint opened to be read a tensor at a time, and what its names say about it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from worldsize.checkpoint import disk, manifest, store
from worldsize.checkpoint.load import read_train
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.checkpoint.facts import TensorFact


class Opened:
    """A checkpoint whose files were compared with its manifest.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        facts: shape and dtype of every tensor under the name it was saved by.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if problems := manifest.verify(self.path):
            raise CheckpointError(f"{path} is damaged", found="; ".join(problems), do="use another checkpoint")
        self.manifest, self._saved = manifest.read(self.path), store.read_metadata(self.path)
        if strangers := store.files_of(self._saved) - self.manifest.files.keys():
            raise CheckpointError(
                f"{path} names files that its manifest does not", found=", ".join(sorted(strangers))
            )
        self.facts: dict[str, TensorFact] = store.facts_of(self._saved)

    @cached_property
    def train(self) -> dict[str, Any]:
        """What the training kept besides tensors."""
        return read_train(self.path)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU, by its own name or that of one it is tied to. Raises CheckpointError."""
        name = self.manifest.aliases.get(name, name)
        fact = self.facts[name]
        found = torch.empty(fact.shape, dtype=fact.dtype)
        try:
            store.read(self.path, self._saved, {name: found})
        except OSError as error:
            raise disk.explain(error, f"reading {name} of", self.path) from error
        return found

    def models(self, kind: str = "model") -> list[str]:
        """The names of the models in it, or of the averages of some (`kind="average"`)."""
        found = (name.split("/", 2) for name in self.facts)
        return list(dict.fromkeys(parts[1] for parts in found if parts[0] == kind and len(parts) > 2))  # noqa: PLR2004

    def weights(self, model: str, kind: str = "model") -> tuple[dict[str, str], dict[str, str]]:
        """The names of one model.

        Returns:
            bare name -> name in the checkpoint; and bare name -> the bare name of what it is tied to.
        """
        start = f"{kind}/{model}/"
        own = {name.removeprefix(start): name for name in self.facts if name.startswith(start)}
        ties: dict[str, str] = {}
        for name, first in self.manifest.aliases.items():
            if name.startswith(start) and first.startswith(start):
                ties[name.removeprefix(start)] = first.removeprefix(start)
            elif name.startswith(start):
                own[name.removeprefix(start)] = first
        return own, ties
