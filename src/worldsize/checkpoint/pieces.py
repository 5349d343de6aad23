"""Room: which pieces the tensors of a checkpoint lie in, and whether they make up whole tensors. No torch.

DCP's metadata is a pickle. Here every class in it becomes a stand-in that only keeps what it was given; what is not on
the list is refused by its name. `store` reads the same file into DCP's own classes, to load by.
"""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.checkpoint import disk
from worldsize.checkpoint.manifest import read
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from worldsize.checkpoint.manifest import Manifest

METADATA = ".metadata"
_DTYPE = re.compile(r"bool|(?:b?float|complex|u?int)(?P<bits>\d+)\w*")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where its bytes lie; `file` is None where the metadata does not say it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor without its values."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Size of all its values."""
        return math.prod(self.shape) * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one value of a dtype, by torch's name for it without `torch.`."""
    found = _DTYPE.fullmatch(dtype)
    bits = found["bits"] if found else None
    return max(1, int(bits) // 8) if bits else 1


class _Given:
    """Stands for an object of DCP's: what it was given and no more."""

    def __init__(self, *_: Any) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {"values": state}


def _word(*words: Any) -> str:
    return str(words[-1])


_DCP = "torch.distributed.checkpoint."
_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (f"{_DCP}metadata", name): _Given
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_DCP}filesystem", "_StorageInfo"): _Given,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _word,
    ("builtins", "getattr"): _word,
}  # fmt: skip


class _StandIns(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} has no place there")


def tensors(path: Path | str) -> dict[str, Saved]:
    """Every tensor of a checkpoint under the name it was saved by. Raises CheckpointError."""
    file = Path(path) / METADATA
    try:
        with file.open("rb") as stream:
            found = _StandIns(stream).load().state
        places = {_key(index.state): place.state for index, place in found["storage_data"].items()}
        return {name: _saved(name, fact.state, places) for name, fact in found["state_dict_metadata"].items()}
    except OSError as error:
        raise disk.explain(error, "reading", file) from error
    except Exception as error:  # damaged pickles raise nearly anything
        raise CheckpointError(
            f"{file} does not hold the facts of tensors",
            found=f"{type(error).__name__}: {error}",
            do="do not load this checkpoint unless you know where it comes from",
        ) from error


def _key(index: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    return index["fqn"], tuple(index["offset"] or ())


def _saved(name: str, fact: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]]) -> Saved:
    pieces = []
    for chunk in fact["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        place = places.get((name, offsets), {})
        pieces.append(
            Piece(offsets, sizes, place.get("relative_path"), place.get("offset", 0), place.get("length", 0))
        )
    return Saved(tuple(fact["size"]), fact["properties"].state["values"][0], tuple(pieces))


def incomplete(path: Path | str) -> list[str]:
    """What is missing of the tensors of a checkpoint, one line each; empty where all are whole. Reads no tensor."""
    try:
        manifest, found = read(path), tensors(path)
    except CheckpointError as error:
        return [str(error)]
    ties = [
        f"{name}: tied to {first}, which is not there"
        for name, first in manifest.aliases.items()
        if first not in found
    ]
    return [f"{name}: {problem}" for name, saved in found.items() for problem in _problems(saved, manifest)] + ties


def _problems(saved: Saved, manifest: Manifest) -> Iterator[str]:
    for piece in saved.pieces:
        fact = manifest.files.get(piece.file or "")
        if fact is None:
            yield f"the piece at {list(piece.offsets)} lies in {piece.file or 'no file'}, which the manifest does not have"
        elif piece.start < 0 or piece.start + piece.length > fact.size:
            yield f"the piece at {list(piece.offsets)} lies beyond the end of {piece.file}"
        if len(piece.offsets) != len(saved.shape) or any(
            start < 0 or start + size > whole
            for start, size, whole in zip(piece.offsets, piece.sizes, saved.shape, strict=False)
        ):
            yield f"the piece at {list(piece.offsets)} of {list(piece.sizes)} lies outside of {list(saved.shape)}"
    covered, whole = sum(math.prod(piece.sizes) for piece in saved.pieces), math.prod(saved.shape)
    if covered != whole:
        yield f"its pieces hold {covered:,} of {whole:,} values"
    elif any(_overlap(one, other) for one, other in combinations(saved.pieces, 2)):
        yield "two of its pieces overlap, so that others are missing"


def _overlap(one: Piece, other: Piece) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in boxes)
