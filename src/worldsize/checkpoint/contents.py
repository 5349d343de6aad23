"""Room: what is in a checkpoint, read without its tensors. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from worldsize.checkpoint import manifest, pieces, retain
from worldsize.checkpoint.load import read_train

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.checkpoint.manifest import Manifest
    from worldsize.checkpoint.pieces import Saved


@dataclass(frozen=True, slots=True)
class Count:
    """How much a part of the state is."""

    tensors: int
    values: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        best: whether it is marked as best.
        progress: where the training stood.
        tensors: every tensor by the name it was saved under.
        optimizers: for each, the hyperparameters of its groups; `parameters` is how many each has.
        kept: what `Run.keep` kept besides tensors.
    """

    path: Path
    manifest: Manifest
    best: bool
    progress: dict[str, Any]
    tensors: dict[str, Saved]
    optimizers: dict[str, list[dict[str, Any]]]
    kept: dict[str, Any]

    @property
    def parts(self) -> dict[str, Count]:
        """How much each part is: `model/<name>`, `optim/<name>`, `average/<name>`, `keep`."""
        found: dict[str, list[Saved]] = {}
        for name, saved in self.tensors.items():
            kind, _, rest = name.partition("/")
            owner, _, own = rest.partition("/")
            found.setdefault(f"{kind}/{owner}" if own and kind != "keep" else kind, []).append(saved)
        return {
            part: Count(len(own), sum(math.prod(each.shape) for each in own), sum(each.bytes for each in own))
            for part, own in found.items()
        }

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        """In plain types.

        Args:
            tensors: with a row for each tensor.
        """
        said = asdict(self.manifest)
        rows = {
            name: {
                "shape": list(saved.shape),
                "dtype": saved.dtype,
                "bytes": saved.bytes,
                "pieces": len(saved.pieces),
            }
            for name, saved in self.tensors.items()
        }
        return {
            "path": str(self.path),
            "best": self.best,
            **said,
            "bytes": self.manifest.bytes,
            "progress": self.progress,
            "parts": {part: asdict(count) for part, count in self.parts.items()},
            "optimizers": self.optimizers,
            "kept": self.kept,
            **({"tensors": rows} if tensors else {}),
        }


def look(path: Path) -> Contents:
    """Read what a checkpoint says. Raises CheckpointError where it cannot be read."""
    said, train = manifest.read(path), read_train(path)
    groups = {name: [_group(group) for group in saved["groups"]] for name, saved in train.get("optim", {}).items()}
    kept = {name: value for name, value in train.get("keep", {}).items() if not isinstance(value, dict)}
    best = said.extra.get("best") is True or said.step in retain.best_steps(path.resolve().parent.parent)
    return Contents(path, said, best, train.get("progress", {}), pieces.tensors(path), groups, kept)


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters that are set; those that are off or left to torch say nothing."""
    own = {key: value for key, value in group.items() if key != "params" and value is not None and value is not False}
    return own | {"parameters": len(group.get("params", ()))}
