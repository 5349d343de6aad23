"""Room: the border to torch.distributed.checkpoint (DCP): who writes which piece, and its files on disk.

Only tensors go in. What DCP would unpickle (its own metadata) is read through an allow-list here. Loading DCP takes as
long as half of torch, so this module is loaded by the first save or load.
"""

from __future__ import annotations

import builtins
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from worldsize.checkpoint import disk, ranges
from worldsize.checkpoint.facts import TensorFact, piece_bytes
from worldsize.errors import CheckpointError
from worldsize.runtime.stretch import Stretch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.planner import ReadItem, SavePlan

    from worldsize.checkpoint.disk import FileFact
    from worldsize.checkpoint.safe import Place

METADATA = ".metadata"

Written = list[tuple[str, int, int]]
"""Where the pieces of one rank's plan lie, in its order: file, offset, length in bytes."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Which rank writes which piece of which tensor."""

    plans: list[SavePlan]
    metadata: dcp.Metadata

    def bytes(self, rank: int) -> int:
        """How many bytes of tensors this rank writes."""
        return sum(piece_bytes(item.tensor_data) for item in self.plans[rank].items)


def propose(tensors: Mapping[str, Tensor]) -> SavePlan:
    """The pieces of these tensors that this rank holds. Local."""
    return create_default_local_save_plan(dict(tensors), is_coordinator=True)


def agree(proposals: list[SavePlan]) -> Agreed:
    """Deal the pieces: what several ranks hold is written by the one with the least to write.

    Every rank computes the same from the same proposals. Raises CheckpointError where they do not fit together.
    """
    _same_tensors(proposals)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        plans, metadata = planner.create_global_plan(proposals)
    except (ValueError, AssertionError) as error:
        raise CheckpointError("the pieces of the ranks do not make up whole tensors", found=str(error)) from error
    names = {name: (name,) for name in metadata.state_dict_metadata}
    # Without names of its own tensors, DCP's tools cannot turn the checkpoint into one file.
    metadata = replace(metadata, planner_data=names)
    return Agreed(FileSystemWriter("unused").prepare_global_plan(plans), metadata)


def _same_tensors(proposals: list[SavePlan]) -> None:
    seen: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for rank, plan in enumerate(proposals):
        for item in plan.items:
            data = cast("Any", item.tensor_data)
            first, size, dtype = seen.setdefault(item.index.fqn, (rank, data.size, data.properties.dtype))
            if (size, dtype) != (data.size, data.properties.dtype):
                raise CheckpointError(
                    f"{item.index.fqn} differs between ranks",
                    found=f"{_shape(size)} {dtype} on rank {first}, {_shape(data.size)} {data.properties.dtype} "
                    f"on rank {rank}",
                    do="build the same model on every rank",
                )


class _Staged(DefaultSavePlanner):
    """Hands out the host copies instead of the tensors of the training."""

    def __init__(self, copies: Mapping[dcp.MetadataIndex, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def lookup_object(self, index: dcp.MetadataIndex) -> Tensor:
        return self._copies[index]


class _Recording(FileSystem):
    """Remembers what every file written through it must be when it is read back."""

    def __init__(self) -> None:
        self.facts: dict[str, FileFact] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        path = cast("Path", self.init_path(path))
        stream = disk.Recorder(path)
        try:
            yield stream
        except RuntimeError:
            if stream.failure:
                raise stream.failure from None
            raise
        finally:
            stream.close()
        self.facts[path.name] = stream.fact()


def write(
    folder: Path, plan: SavePlan, copies: Mapping[dcp.MetadataIndex, Tensor]
) -> tuple[Written, dict[str, FileFact]]:
    """Write this rank's pieces, synced. Returns where they lie and what the files must be. Raises OSError."""
    if not plan.items:
        return [], {}
    # Copying ahead would touch the default CUDA device from this thread, and the copies are on the host already.
    writer, files = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0), _Recording()
    writer.fs = files
    results = writer.write_data(plan, _Staged(copies)).wait()
    places = {result.index: result.storage_data for result in results}
    written = [places[item.index] for item in plan.items]
    return [(place.relative_path, place.offset, place.length) for place in written], files.facts


def write_metadata(folder: Path, agreed: Agreed, written: list[Written]) -> FileFact:
    """Write DCP's metadata, which says where every piece lies. Returns what the file must be."""
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for plan, mine in zip(agreed.plans, written, strict=True):
        places |= {item.index: _StorageInfo(*place) for item, place in zip(plan.items, mine, strict=True)}
    whole = replace(agreed.metadata, storage_data=places, storage_meta=dcp.StorageMeta(), version="1.0.0")
    file = disk.Recorder(folder / METADATA)
    try:
        file.write(pickle.dumps(whole))
    finally:
        file.close()
    return file.fact()


_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorStorageMetadata,
        dcp.TensorProperties,
        dcp.ChunkStorageMetadata,
        dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 DCP's own files name it
        _StorageInfo,
        torch.Size,
    )
}


def _member(kind: Any, name: str) -> Any:
    """What some versions of Python pickle an enum's member with, for this one enum."""
    if kind is not dcp._MEM_FORMAT_ENCODING:  # noqa: SLF001
        raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r})")
    return kind[name]


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {name!r}")
    return torch.strided


class _Refused(pickle.UnpicklingError):
    """The metadata names something that does not belong there."""


class _AllowList(pickle.Unpickler):
    """Only the plain facts about tensors; nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is not None:
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == (builtins.__name__, "getattr"):
            return _member
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise _Refused(f"{module}.{name}")


def read_metadata(path: Path) -> dcp.Metadata:
    """DCP's metadata of a checkpoint, through an allow-list. Raises CheckpointError naming what else it holds."""
    file = path / METADATA
    try:
        with file.open("rb") as stream:
            found = _AllowList(stream).load()
    except _Refused as error:
        raise CheckpointError(
            f"{file} asks for a class that has no place there", found=str(error), do=_FOREIGN
        ) from None
    except OSError as error:
        raise disk.explain(error, "reading", file) from error
    except Exception as error:  # damaged pickles raise nearly anything
        raise CheckpointError(f"{file} cannot be read", found=f"{type(error).__name__}: {error}") from error
    if not _sound(found):
        raise CheckpointError(f"{file} does not hold the facts of tensors", found=type(found).__name__, do=_FOREIGN)
    return cast("dcp.Metadata", found)


_FOREIGN = "do not load this checkpoint unless you know where it comes from"


def _sound(found: Any) -> bool:
    return (
        isinstance(found, dcp.Metadata)
        and isinstance(found.storage_data, dict)
        and all(type(place) is _StorageInfo for place in found.storage_data.values())
        and all(type(fact) is dcp.TensorStorageMetadata for fact in found.state_dict_metadata.values())
    )


def files_of(metadata: dcp.Metadata) -> set[str]:
    """The files that hold the tensors."""
    return {place.relative_path for place in metadata.storage_data.values()}


def facts_of(metadata: dcp.Metadata) -> dict[str, TensorFact]:
    """Shape and dtype of every saved tensor."""
    saved = cast("dict[str, Any]", metadata.state_dict_metadata)
    return {name: TensorFact(tuple(fact.size), fact.properties.dtype) for name, fact in saved.items()}


def of_places(places: Mapping[str, Place]) -> dcp.Metadata:
    """What `read` needs to know of tensors that lie whole in files of others."""
    facts: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, place in places.items():
        shape = torch.Size(place.fact.shape)
        start = torch.Size([0] * len(shape))
        chunk = dcp.ChunkStorageMetadata(start, shape)
        facts[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(place.fact.dtype), shape, [chunk])
        length = shape.numel() * place.fact.dtype.itemsize
        storage[dcp.MetadataIndex(name, start, 0)] = _StorageInfo(str(place.file), place.start, length)
    return dcp.Metadata(facts, storage_data=storage)


def read(path: Path, metadata: dcp.Metadata, tensors: Mapping[str, Tensor | Stretch], *, bare: bool = False) -> None:
    """Fill these tensors in place with what this rank needs of them, whatever their dtype. Local.

    Args:
        path: the folder of the files.
        metadata: where pieces lie in them.
        tensors: by name.
        bare: pieces are values alone, not archives of torch.save.

    Raises:
        OSError, CheckpointError: reading failed.
    """
    wanted = [*_of_tensors(tensors, metadata), *_of_stretches(tensors, metadata)]
    wanted.sort(key=lambda each: _place(each[0], metadata))
    for name, group in groupby(wanted, key=lambda each: _place(each[0], metadata)[0]):
        with (path / name).open("rb", buffering=0) as file:
            for item, target in group:
                _read_item(file.fileno(), item, metadata, target(), bare=bare)


Wanted = tuple["ReadItem", "Callable[[], Tensor]"]
"""A box of a saved piece, and what gives the tensor that it goes to."""


def _of_tensors(tensors: Mapping[str, Tensor | Stretch], metadata: dcp.Metadata) -> list[Wanted]:
    state: dict[str, Any] = {name: value for name, value in tensors.items() if not isinstance(value, Stretch)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    items = create_default_local_load_plan(state, metadata).items
    return [(item, lambda item=item: planner.resolve_tensor(item).detach()) for item in items]  # type: ignore[misc]


def _of_stretches(tensors: Mapping[str, Tensor | Stretch], metadata: dcp.Metadata) -> list[Wanted]:
    found: list[Wanted] = []
    for name, value in tensors.items():
        if isinstance(value, Stretch):
            boxes = list(value.boxes())
            chunks = [dcp.ChunkStorageMetadata(torch.Size(at), values.shape) for at, values in boxes]
            fact = cast("dcp.TensorStorageMetadata", metadata.state_dict_metadata[name])
            found += [
                (item, partial(_box, boxes[cast("int", item.dest_index.index)][1], item))
                for item in create_read_items_for_chunk_list(name, fact, chunks)
            ]
    return found


def _box(values: Tensor, item: ReadItem) -> Tensor:
    return narrow_tensor_by_index(values, item.dest_offsets, item.lengths)


def _read_item(descriptor: int, item: ReadItem, metadata: dcp.Metadata, target: Tensor, *, bare: bool) -> None:
    """Read one box. Reading the items in the order of `_place` reads disks forwards."""
    place = metadata.storage_data[item.storage_index]
    fact = cast("dcp.TensorStorageMetadata", metadata.state_dict_metadata[item.storage_index.fqn])
    chunk = next(chunk for chunk in fact.chunks if chunk.offsets == item.storage_index.offset)
    if not target.numel():
        return
    dtype = fact.properties.dtype
    size = chunk.sizes.numel() * dtype.itemsize
    start = place.offset if bare else ranges.values(descriptor, place.offset, place.length, size)
    ranges.fill(descriptor, start, chunk.sizes, item.storage_offsets, target, dtype=dtype)


def _place(item: ReadItem, metadata: dcp.Metadata) -> tuple[str, int]:
    info = metadata.storage_data[item.storage_index]
    return info.relative_path, info.offset


def _shape(size: torch.Size) -> str:
    return str(list(size))
