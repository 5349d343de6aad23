"""Room: the tensors of safetensors files as boxes on disk, so that a rank reads what it holds and no more.

The format: eight bytes with the length of a header, little-endian; the header, JSON of name -> dtype, shape, data_offsets;
the values of all tensors, row-major, one after another (huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from worldsize.checkpoint import disk
from worldsize.checkpoint.facts import TensorFact
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip
"""By the format's names."""
_LENGTH = 8
_LONGEST = 100_000_000
"""Of a header, by the format."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's values lie."""

    fact: TensorFact
    file: Path
    start: int


def places(path: Path) -> dict[str, Place]:
    """Every tensor of a file, or of all files of an index. Tied names, where they are written once, stand for the first.

    Raises:
        CheckpointError: a file is damaged, is missing, or lies outside of the index's folder.
    """
    files = [path] if path.suffix == SUFFIX else [path.parent / name for name in indexed(path)]
    return {name: place for file in files for name, place in _places(file)}


def indexed(path: Path) -> list[str]:
    """The files that an index names, in order. Raises CheckpointError where it is no index, or one leads elsewhere."""
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except OSError as error:
        raise disk.explain(error, "reading", path) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of weights", found=f"{type(error).__name__}: {error}") from error
    if odd := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{path} names files outside its folder", found=odd[0])
    return names


def _places(file: Path) -> Iterator[tuple[str, Place]]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH), "little")
            header = _header(file, stream.read(min(length, _LONGEST)), length)
            values = stream.seek(0, 2) - _LENGTH - length
    except OSError as error:
        raise disk.explain(error, "reading", file) from error
    said = header.pop("__metadata__", None) or {}
    found = {name: _place(file, name, entry, _LENGTH + length, values) for name, entry in header.items()}
    yield from found.items()
    yield from ((name, found[first]) for name, first in said.items() if first in found and name not in found)


def _header(file: Path, text: bytes, length: int) -> dict[str, Any]:
    try:
        found = json.loads(text) if len(text) == length else None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged or no safetensors file", found=f"its header: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is damaged or no safetensors file", found=f"a header of {length:,} bytes")
    return found


def _place(file: Path, name: str, entry: Mapping[str, Any], begin: int, values: int) -> Place:
    try:
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: what it says of {name}", found=str(entry)) from error
    if stop - start != math.prod(shape) * dtype.itemsize or start < 0 or stop > values:
        raise CheckpointError(
            f"{file} is damaged: {name} does not lie where it says",
            found=f"{list(shape)} {dtype} in bytes {start:,} to {stop:,} of {values:,}",
            do="fetch it again",
        )
    return Place(TensorFact(shape, dtype), file, begin + start)
