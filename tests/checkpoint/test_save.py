from __future__ import annotations

import errno
import os
import random
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.states import blank, checkpointer, facts, odd, path_of, same, save_once
from worldsize.checkpoint import manifest, stage, store
from worldsize.checkpoint.load import load, newest, read_train
from worldsize.checkpoint.manifest import FOLDER, committed, read, verify
from worldsize.checkpoint.owner import claim
from worldsize.checkpoint.retain import Keep
from worldsize.checkpoint.save import Checkpointer
from worldsize.errors import CheckpointError, OwnershipError
from worldsize.runtime.comm import Alone


def names(run_dir: Path) -> list[str]:
    """Everything in the folder of checkpoints."""
    return sorted(path.name for path in (run_dir / FOLDER).iterdir())


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_was_saved_loads(tmp_path: Path, *, synchronous: bool) -> None:
    """Tensors of every kind come back bit for bit, into tensors that are not contiguous too."""
    tensors = odd(1)
    outcome = save_once(tmp_path, Alone(), tensors, 3, synchronous=synchronous)
    assert outcome.error is None
    assert verify(outcome.path) == []
    found = blank(tensors)
    load(outcome.path, found, Alone())
    assert same(found, tensors)


def test_the_folder_holds_what_the_manifest_says(tmp_path: Path) -> None:
    """Every file is named with its size, progress and layout are told, nothing hidden is left."""
    outcome = save_once(tmp_path, Alone(), odd(), 30)
    found = read(outcome.path)
    assert set(found.files) | {manifest.MANIFEST} == {path.name for path in outcome.path.iterdir()}
    assert (found.step, found.epoch, found.samples, found.attempt) == (30, 3, 120, 0)
    assert found.layout == {"strategy": "x"}
    assert found.bytes == outcome.bytes
    assert names(tmp_path) == [outcome.path.name]


def test_no_path_of_the_machine_is_written(tmp_path: Path) -> None:
    """A checkpoint can be given away: nothing in it says where it was written."""
    outcome = save_once(tmp_path, Alone(), odd(), 3)
    assert not [path for path in outcome.path.iterdir() if str(tmp_path).encode() in path.read_bytes()]


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns before anything is on disk; what the training changes afterwards is not in the checkpoint."""
    go, write = threading.Event(), store.write
    monkeypatch.setattr(store, "write", lambda *given: (go.wait(), write(*given))[1])
    saver, tensors = checkpointer(tmp_path, Alone()), odd(1)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    saver.save(tensors, {}, facts(1))
    assert saver.busy
    assert saver.poll() == []
    for tensor in tensors.values():
        tensor.zero_()
    go.set()
    assert [outcome.error for outcome in saver.wait()] == [None]
    assert not saver.busy
    load(path_of(tmp_path, 1), tensors, Alone())
    assert same(tensors, expected)
    saver.close()


def test_never_two_saves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is due while one is under way waits for it; every one is committed."""
    inside, write, most = [0], store.write, [0]

    def slow(*given: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.02)
        inside[0] -= 1
        return write(*given)

    monkeypatch.setattr(store, "write", slow)
    saver = checkpointer(tmp_path, Alone(), keep=Keep(last=9))
    for step in range(5):
        saver.save(odd(step), {}, facts(step))
    saver.wait()
    saver.close()
    assert most == [1]
    assert len(committed(tmp_path)) == 5


def test_host_memory_is_used_again(tmp_path: Path) -> None:
    """The second save of the same tensors allocates nothing."""
    saver = checkpointer(tmp_path, Alone())
    saver.prepare(odd())
    saver.save(odd(1), {}, facts(1), wait=True)
    first = saver._staging
    saver.save(odd(2), {}, facts(2), wait=True)
    assert first is not None
    assert saver._staging is first
    saver.close()


def test_no_host_memory_is_held_where_no_save_is_near(tmp_path: Path) -> None:
    """It is known how large a checkpoint will be; memory for it is made by the save itself."""
    saver = checkpointer(tmp_path, Alone())
    saver.prepare(odd(), memory=False)
    assert saver._staging is None
    saver.save(odd(1), {}, facts(1), wait=True)
    assert committed(tmp_path)
    saver.close()


def test_a_tensor_more_is_planned_anew(tmp_path: Path) -> None:
    """State that appears later (an optimizer's first step) is in the next checkpoint."""
    saver, tensors = checkpointer(tmp_path, Alone()), odd()
    saver.save(tensors, {}, facts(1), wait=True)
    tensors["optim/weight/exp_avg"] = torch.ones(5, 4)
    saver.save(tensors, {}, facts(2), wait=True)
    saver.close()
    found = blank(tensors)
    load(path_of(tmp_path, 2), found, Alone())
    assert same(found, tensors)


def test_tied_tensors_are_saved_once(tmp_path: Path) -> None:
    """Two names of one storage take the space of one, and both load, tied there or not."""
    weight = torch.randn(1000)
    tensors = {"model/a": weight, "model/b": weight.detach(), "model/half": weight[:500]}
    outcome = save_once(tmp_path, Alone(), tensors, 1)
    assert outcome.bytes < 1.7 * weight.nbytes + 4000
    assert read(outcome.path).aliases == {"model/b": "model/a"}
    untied = blank(tensors)
    load(outcome.path, untied, Alone())
    assert same(untied, tensors)


def test_an_empty_training_saves(tmp_path: Path) -> None:
    """A training without tensors still has its state."""
    outcome = save_once(tmp_path, Alone(), {}, 1)
    assert outcome.error is None
    load(outcome.path, {}, Alone())


def test_the_state_of_training_comes_back(tmp_path: Path) -> None:
    """B058: random states as plain values and tensors come back exactly, and the next draws are the same."""
    kind, keys, position, *_ = np.random.RandomState(3).get_state(legacy=True)
    version, internal, gauss = random.Random(3).getstate()
    train: dict[str, Any] = {
        "numpy": [kind, np.asarray(keys).tolist(), position],
        "python": [version, list(internal), gauss],
    }
    train |= {"loss": np.float64(0.1), "best": float("inf"), "big": 2**70, "text": "ä\n"}
    saver = checkpointer(tmp_path, Alone())
    saver.save({"keep/rng": torch.Generator().manual_seed(3).get_state()}, train, facts(1), wait=True)
    saver.close()
    found = read_train(path_of(tmp_path, 1))
    assert found == train
    generator = random.Random()
    generator.setstate((found["python"][0], tuple(found["python"][1]), found["python"][2]))
    assert generator.random() == random.Random(3).random()


@pytest.mark.parametrize(
    ("value", "where"),
    [(np.float32(1), "train\\['x'\\]"), ([1, (2, 3)], "train\\['x'\\]\\[1\\]"), ({3: 1}, "key 3"), (b"", "bytes")],
)
def test_what_json_would_change_is_refused_at_save(tmp_path: Path, value: Any, where: str) -> None:
    """B058: a value that would not come back as it went in is named before anything is written."""
    saver = checkpointer(tmp_path, Alone())
    with pytest.raises(CheckpointError, match=where):
        saver.save(odd(), {"x": value}, facts(1))
    saver.close()
    assert committed(tmp_path) == []


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), 3.0, None])
def test_what_is_no_dense_tensor_is_named(tmp_path: Path, value: Any) -> None:
    """Something else among the tensors is refused by its name."""
    saver = checkpointer(tmp_path, Alone())
    with pytest.raises(CheckpointError, match="keep/odd is not a dense tensor"):
        saver.save({"keep/odd": value}, {}, facts(1))
    saver.close()


def test_the_same_step_twice_is_one_save(tmp_path: Path) -> None:
    """The last save of a run does nothing where the periodic one has just committed the same."""
    saver = checkpointer(tmp_path, Alone())
    saver.save(odd(), {"a": 1}, facts(1), wait=True)
    saver.save(odd(), {"a": 1}, facts(1), wait=True)
    assert len(saver.poll()) == 1
    saver.save(odd(), {"a": 2}, facts(1), wait=True)
    assert len(saver.poll()) == 1
    assert read_train(path_of(tmp_path, 1)) == {"a": 2}
    assert names(tmp_path) == ["step-00000001"]
    saver.close()


def test_old_ones_go_when_the_new_one_is_there(tmp_path: Path) -> None:
    """Retention keeps the last ones and the best, and tells what it removed."""
    saver = checkpointer(tmp_path, Alone(), keep=Keep(last=2, best=1))
    for step in range(1, 6):
        if step == 5:
            saver.mark_best(3)
        saver.save(odd(step), {}, facts(step, best=step == 1), wait=True)
    saver.close()
    assert [outcome.removed for outcome in saver.poll()] == [(), (), (), (2,), (1,)]
    assert [read(path).step for path in committed(tmp_path)] == [3, 4, 5]


def test_estimate(tmp_path: Path) -> None:
    """B057: before training it is known how large a checkpoint will be and whether it fits."""
    saver, tensors = checkpointer(tmp_path, Alone()), odd()
    estimate = saver.prepare(tensors)
    assert estimate.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert estimate.fits
    saver.close()


def test_a_full_disk_leaves_the_old_checkpoint(small_disk: Path) -> None:
    """B057: no space left: the old checkpoint stays, nothing half-written is left, one line tells path and space."""
    run = small_disk / "run"
    save_once(run, Alone(), {"model/w": torch.ones(100_000)}, 1, keep=Keep(last=1))
    outcome = save_once(run, Alone(), {"model/w": torch.zeros(190_000)}, 2, keep=Keep(last=1))
    assert isinstance(outcome.error, CheckpointError)
    text = str(outcome.error)
    assert str(run / FOLDER) in text
    assert "No space left on device" in text
    assert "bytes free there" in text
    assert "\n" not in text
    assert names(run) == ["step-00000001"]
    assert newest(run, Alone()) == (path_of(run, 1), [])


def test_saving_works_again_when_there_is_space(small_disk: Path) -> None:
    """B057: after a failed save training goes on, and the next one is committed."""
    saver = checkpointer(small_disk / "run", Alone())
    saver.save({"model/w": torch.ones(400_000)}, {}, facts(1))
    saver.save({"model/w": torch.ones(10)}, {}, facts(2))
    assert [outcome.error is None for outcome in saver.wait()] == [False, True]
    saver.close()


def test_stop_on_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_error="stop" the next collective call raises the error of the save; `poll` still tells it."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    saver = checkpointer(tmp_path, Alone(), on_error="stop")
    monkeypatch.setattr(store, "write", fail)
    saver.save(odd(), {}, facts(1))
    with pytest.raises(CheckpointError, match=r"quota.*EDQUOT.*free some of your quota"):
        saver.wait()
    assert len(saver.poll()) == 1
    saver.close()


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """A limit of the shell (ulimit -f) ends the save like a full disk, not the process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        outcome = save_once(tmp_path, Alone(), {"model/w": torch.ones(100_000)}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit" in str(outcome.error)
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["write_metadata", "write"])
def test_any_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whatever goes wrong in the background is told as the outcome, and the folder is as before."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("odd")

    saver = checkpointer(tmp_path, Alone())
    monkeypatch.setattr(store, call, fail)
    saver.save(odd(), {}, facts(1), wait=True)
    (outcome,) = saver.poll()
    assert "ZeroDivisionError: odd" in str(outcome.error)
    assert names(tmp_path) == []
    saver.close()


def test_no_memory_for_the_copy_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that cannot be had ends the save, not the training."""

    def fail(*_: Any) -> None:
        raise MemoryError("12 GB")

    saver = checkpointer(tmp_path, Alone())
    monkeypatch.setattr(stage.Staging, "fill", fail)
    saver.save(odd(), {}, facts(1), wait=True)
    (outcome,) = saver.poll()
    assert "MemoryError: 12 GB" in str(outcome.error)
    saver.close()


def test_a_file_that_reads_back_differently_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is read back before it is committed, so that the old ones go only for a sound new one."""
    real = store.write

    def spoil(folder: Path, *given: Any) -> Any:
        written = real(folder, *given)
        raw = bytearray((folder / "__0_0.distcp").read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / "__0_0.distcp").write_bytes(raw)
        return written

    save_once(tmp_path, Alone(), odd(), 1, keep=Keep(last=1))
    monkeypatch.setattr(store, "write", spoil)
    outcome = save_once(tmp_path, Alone(), odd(), 2, keep=Keep(last=1))
    assert "does not read back" in str(outcome.error)
    assert names(tmp_path) == ["step-00000001"]


def test_old_ones_that_cannot_be_deleted_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble with deleting old checkpoints does not make the new one a failure."""

    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr("worldsize.checkpoint.retain.remove", fail)
    save_once(tmp_path, Alone(), odd(), 1, keep=Keep(last=1))
    outcome = save_once(tmp_path, Alone(), odd(), 2, keep=Keep(last=1))
    assert outcome.error is None
    assert outcome.note
    assert newest(tmp_path, Alone())[0] == path_of(tmp_path, 2)


def test_a_writer_that_was_cut_off_cannot_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor that starts while a save is being written: that save ends without a commit."""
    written, go, write = threading.Event(), threading.Event(), store.write

    def halfway(*given: Any) -> Any:
        done = write(*given)
        written.set()
        go.wait()
        return done

    monkeypatch.setattr(store, "write", halfway)
    saver = checkpointer(tmp_path, Alone())
    saver.save(odd(), {}, facts(1))
    assert written.wait(60.0)
    new = claim(tmp_path, run_id="r")
    go.set()
    (outcome,) = saver.wait()
    assert outcome.error is not None
    assert committed(tmp_path) == []
    new.check()
    saver.close()


def test_a_writer_cut_off_before_it_began(tmp_path: Path) -> None:
    """The check right before the rename stops a whole save of the older attempt."""
    saver = checkpointer(tmp_path, Alone())
    new = claim(tmp_path, run_id="r")
    with pytest.raises(OwnershipError, match="attempt 0"):
        saver.save(odd(), {}, facts(1), wait=True)
    saver.close()
    assert names(tmp_path) == []
    new.check()


def test_the_successor_sweeps_between_check_and_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a writer that passed its check just before the successor came finds nothing left to rename."""
    saver = checkpointer(tmp_path, Alone())
    owner = saver._owner
    assert owner is not None
    real = type(owner).check

    def late(self: Any) -> None:
        real(self)
        monkeypatch.setattr(type(owner), "check", real)
        claim(tmp_path, run_id="r")

    monkeypatch.setattr(type(owner), "check", late)
    saver.save(odd(), {}, facts(1), wait=True)
    (outcome,) = saver.poll()
    assert outcome.error is not None
    assert names(tmp_path) == []
    saver.close()


def test_one_owner_is_needed(tmp_path: Path) -> None:
    """A checkpointer without the claim cannot save."""
    with pytest.raises(CheckpointError, match="0 of 1 ranks"):
        Checkpointer(tmp_path, Alone(), owner=None)


def test_a_stop_while_saving_waits_for_the_commit(tmp_path: Path) -> None:
    """SystemExit in the training while a save is under way: close() waits, and the checkpoint is there."""
    saver = checkpointer(tmp_path, Alone())

    def train() -> None:
        try:
            saver.save(odd(), {}, facts(1))
            raise SystemExit(75)
        finally:
            saver.close()

    with pytest.raises(SystemExit):
        train()
    assert [read(path).step for path in committed(tmp_path)] == [1]


def test_a_failed_process_does_not_wait_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save is under way while its memory is made ready, which may take half a minute."""
    free, made = threading.Event(), stage.Staging

    def slow(*args: Any, **how: Any) -> stage.Staging:
        free.wait(20)
        return made(*args, **how)

    monkeypatch.setattr(stage, "Staging", slow)
    saver = checkpointer(tmp_path, Alone())
    saver.prepare({"model/w": torch.zeros(4)})
    assert not saver.busy
    saver.finish()
    assert saver._thread is not None
    assert saver._thread.is_alive()
    free.set()
    saver.close()


def test_a_forked_process_does_not_take_the_host_memory_along(tmp_path: Path) -> None:
    """What is registered with a device would be copied for every data worker."""
    saver = checkpointer(tmp_path, Alone())
    saver.save({"model/w": torch.arange(64 << 18, dtype=torch.float32)}, {}, facts(1), wait=True)
    assert saver._staging is not None
    start = saver._staging._memory.pieces[0].data_ptr()
    assert "dc" in flags_of_mapping(start)
    saver.close()


def flags_of_mapping(address: int) -> list[str]:
    """Linux's flags of the mapping in which an address lies: "dc" is "do not copy on fork" (proc(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(part, 16) for part in words[0].split("-"))
            inside = low <= address < high
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []
