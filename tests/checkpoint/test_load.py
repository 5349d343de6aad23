from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoint.states import blank, odd, path_of, same, save_once
from worldsize.checkpoint.facts import TensorFact
from worldsize.checkpoint.load import load, metadata, newest, read_train
from worldsize.checkpoint.manifest import FOLDER, TRAIN, verify
from worldsize.checkpoint.retain import Keep
from worldsize.checkpoint.store import METADATA, read_metadata
from worldsize.errors import CheckpointError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path

KEEP = Keep(last=9)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 8, 9 and 10."""
    for step in (8, 9, 10):
        save_once(tmp_path, Alone(), odd(step), step, keep=KEEP)
    return tmp_path


def halve(path: Path) -> None:
    """Cut a file in two and keep the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_the_newest_is_chosen_by_number(three: Path) -> None:
    """Step 10 is newer than step 9, whatever its text says."""
    assert newest(three, Alone()) == (path_of(three, 10), [])


def test_a_run_without_checkpoints_begins(tmp_path: Path) -> None:
    """No checkpoint yet is no error."""
    assert newest(tmp_path, Alone()) == (None, [])


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, TRAIN, "manifest.json"])
def test_a_truncated_file_is_skipped_in_one_line(three: Path, name: str) -> None:
    """B056: a checkpoint cut in half is skipped for the one before, and one line says which and why."""
    halve(path_of(three, 10) / name)
    path, skipped = newest(three, Alone())
    assert path == path_of(three, 9)
    assert len(skipped) == 1
    assert "step-00000010" in skipped[0]
    assert name in skipped[0]
    assert "\n" not in skipped[0]


def test_a_flipped_byte_is_skipped(three: Path) -> None:
    """A byte that changed on disk, which DCP by itself would load, is found by its digest."""
    file = path_of(three, 10) / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    file.write_bytes(raw)
    assert newest(three, Alone())[0] == path_of(three, 9)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found(three: Path, data: st.DataObject) -> None:
    """Whichever bit of whichever tensor file, metadata or train.json changes: verify finds it."""
    path = path_of(three, 10)
    file = data.draw(st.sampled_from([path / "__0_0.distcp", path / METADATA, path / TRAIN]))
    raw = file.read_bytes()
    spoiled = bytearray(raw)
    spoiled[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(spoiled)
    try:
        assert len(verify(path)) == 1
    finally:
        file.write_bytes(raw)


def test_none_that_verifies_never_begins_anew(three: Path) -> None:
    """Where all checkpoints are damaged the run does not start from the beginning by itself."""
    for step in (8, 9, 10):
        (path_of(three, step) / TRAIN).unlink()
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        newest(three, Alone())


def test_a_fresh_commit_is_waited_for(three: Path) -> None:
    """A rank that does not see the newest checkpoint yet waits till it appears."""

    class Ahead(Alone):
        """Another rank sees step 10 already."""

        def gather(self, value: Any) -> list[Any]:
            return [[*value, path_of(three, 10)] if isinstance(value, list) and path_of(three, 9) in value else value]

    hidden = path_of(three, 10).rename(three / "later")
    timer = threading.Timer(0.2, lambda: hidden.rename(path_of(three, 10)))
    timer.start()
    assert newest(three, Ahead(), patience=10)[0] == path_of(three, 10)
    timer.join()
    path_of(three, 10).rename(three / "never")
    path, skipped = newest(three, Ahead(), patience=0.1)
    assert path == path_of(three, 9)
    assert "must be shared" in skipped[0]


def test_missing_and_unexpected_are_counted(three: Path) -> None:
    """Loading is strict: both differences are told with counts and names."""
    tensors = odd()
    del tensors["model/weight"], tensors["model/half"]
    tensors["model/new"] = torch.zeros(1)
    with pytest.raises(
        CheckpointError, match=r"1 are not in it \(model/new\); 2 are only in it \(model/half, model/w"
    ):
        load(path_of(three, 10), tensors, Alone())


@pytest.mark.parametrize("other", [torch.zeros(4, 5), torch.zeros(5, 4, dtype=torch.float64)])
def test_another_shape_or_dtype_is_named(three: Path, other: torch.Tensor) -> None:
    """A tensor that would need to be cut or rounded is refused with both facts."""
    with pytest.raises(CheckpointError, match=r"model/weight.*\[5, 4\] torch.float32 saved"):
        load(path_of(three, 10), odd() | {"model/weight": other}, Alone())


def test_metadata(three: Path) -> None:
    """Shapes and dtypes are known without reading a tensor."""
    assert metadata(path_of(three, 10)) == {
        name: TensorFact(tuple(tensor.shape), tensor.dtype) for name, tensor in odd().items()
    }


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("owned",)


def test_metadata_that_would_run_code_is_refused(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DCP's metadata is a pickle: a class that has no place there is named, not called."""
    (path_of(three, 10) / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        metadata(path_of(three, 10))
    assert capsys.readouterr().out == ""


def test_getattr_reaches_nothing_else(three: Path) -> None:
    """The one getattr that some versions of Python need for an enum cannot fetch anything from elsewhere."""
    evil = b"\x80\x04cbuiltins\ngetattr\n(ctorch\nSize\n\x8c\x08__doc__\x94tR."
    (path_of(three, 10) / METADATA).write_bytes(evil)
    with pytest.raises(CheckpointError):
        metadata(path_of(three, 10))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_damaged_metadata_is_one_line(three: Path, content: bytes) -> None:
    """Metadata that is none is a CheckpointError naming the file."""
    (path_of(three, 10) / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=METADATA):
        metadata(path_of(three, 10))


def test_objects_beside_tensors_are_refused(tmp_path: Path) -> None:
    """A DCP folder that holds pickled objects is not read as if it were ours."""
    state: dict[str, Any] = {"a": torch.ones(2), "b": "text"}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(state, checkpoint_id=tmp_path / "x")
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path / "x")


def test_damaged_train_is_told(three: Path) -> None:
    """A train.json that is no JSON is a CheckpointError."""
    (path_of(three, 10) / TRAIN).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        read_train(path_of(three, 10))


def test_dcp_itself_reads_our_folder(three: Path, tmp_path: Path) -> None:
    """A checkpoint is a plain DCP checkpoint: torch's own load and its converter read it."""
    found: dict[str, Any] = blank(odd())
    with pytest.warns(UserWarning, match="single process"):
        state_dict_loader.load(found, checkpoint_id=path_of(three, 10))
    assert same(found, odd(10))
    dcp_to_torch_save(path_of(three, 10), tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt", weights_only=True), odd(10))


def test_a_metadata_cannot_reach_outside(three: Path) -> None:
    """Tensor files that the manifest does not know are not opened."""
    file = path_of(three, 10) / METADATA
    file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../0_0.distc"))
    with pytest.raises(CheckpointError, match="files that its manifest does not"):
        load(path_of(three, 10), odd(), Alone())


def test_hidden_folders_are_no_checkpoints(three: Path) -> None:
    """What is being written is not looked at."""
    path_of(three, 10).rename(three / FOLDER / ".step-00000010.x.tmp")
    assert newest(three, Alone())[0] == path_of(three, 9)
