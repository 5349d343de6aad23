from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoint.states import full, odd, path_of, save_once, sharded
from tests.pools import together
from worldsize.checkpoint import disk, load, manifest, pieces, store
from worldsize.errors import CheckpointError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.runtime.comm import Comm


def save_sharded(comm: Comm, run: Path) -> None:
    """A checkpoint in pieces of several ranks."""
    save_once(run, comm, sharded(full(), comm), 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint that two ranks wrote."""
    together(save_sharded, 2, tmp_path)
    return path_of(tmp_path, 1)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata, and the manifest so that its digests fit."""
    (path / store.METADATA).write_bytes(pickle.dumps(change(store.read_metadata(path))))
    said = manifest.read(path)
    files = said.files | {store.METADATA: disk.fact(path / store.METADATA)}
    (path / manifest.MANIFEST).write_text(replace(said, files=files).to_json())
    assert manifest.verify(path) == []


def test_the_facts_are_those_that_torch_reads(path: Path, tmp_path: Path) -> None:
    """Without torch the same names, shapes, dtypes and sizes are found, of every kind of tensor."""
    save_once(tmp_path / "odd", Alone(), odd(), 1)
    for where in (path, path_of(tmp_path / "odd", 1)):
        found = {name: (saved.shape, saved.dtype, saved.bytes) for name, saved in pieces.tensors(where).items()}
        assert found == {
            name: (
                fact.shape,
                str(fact.dtype).removeprefix("torch."),
                torch.empty(fact.shape, dtype=fact.dtype).nbytes,
            )
            for name, fact in load.metadata(where).items()
        }


def test_a_whole_checkpoint_has_all_pieces(path: Path) -> None:
    """Nothing is said about pieces that make up their tensors."""
    assert len(pieces.tensors(path)["model/w"].pieces) == 2
    assert pieces.incomplete(path) == []


def test_a_missing_piece_is_named(path: Path) -> None:
    """A tensor without one of its pieces is named with the counts, although all digests fit."""

    def change(metadata: Any) -> Any:
        metadata.state_dict_metadata["model/w"].chunks.pop()
        return metadata

    rewrite(path, change)
    assert pieces.incomplete(path) == ["model/w: its pieces hold 12 of 21 values"]


def test_a_piece_twice_is_named(path: Path) -> None:
    """Pieces that lie over each other leave others out."""

    def change(metadata: Any) -> Any:
        chunks = metadata.state_dict_metadata["optim/w/exp_avg"].chunks
        chunks[1] = replace(chunks[1], offsets=torch.Size([3, 0]))
        return metadata

    rewrite(path, change)
    wrong = pieces.incomplete(path)
    assert "optim/w/exp_avg: two of its pieces overlap, so that others are missing" in wrong
    assert any("no file" in line for line in wrong)


def test_a_piece_beyond_its_file_is_named(path: Path) -> None:
    """A place that the file does not have is told without reading it."""

    def change(metadata: Any) -> Any:
        index = next(index for index in metadata.storage_data if index.fqn == "model/b")
        metadata.storage_data[index] = replace(metadata.storage_data[index], offset=10**9)
        return metadata

    rewrite(path, change)
    (wrong,) = pieces.incomplete(path)
    assert wrong.startswith("model/b: the piece at [0] lies beyond the end of __")


def test_a_tie_to_nothing_is_named(path: Path) -> None:
    """An alias needs the tensor that it stands for."""
    said = manifest.read(path)
    (path / manifest.MANIFEST).write_text(replace(said, aliases={"model/x": "model/y"}).to_json())
    assert pieces.incomplete(path) == ["model/x: tied to model/y, which is not there"]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("owned",)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Evil()), b"", pickle.dumps({"a": 1}), pickle.dumps(torch.Size([1]))]
)
def test_metadata_that_is_none_is_refused(path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """What has no place in the metadata is an error and never called."""
    (path / store.METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=store.METADATA):
        pieces.tensors(path)
    assert capsys.readouterr().out == ""
