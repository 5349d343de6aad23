from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoint.states import checkpointer, facts, path_of, same
from worldsize.checkpoint.load import load, newest, read_train
from worldsize.checkpoint.manifest import FOLDER, committed, read, step_of, verify
from worldsize.checkpoint.owner import claim
from worldsize.checkpoint.retain import Keep
from worldsize.errors import CheckpointError
from worldsize.runtime.comm import Alone, Comm, Ranks

if TYPE_CHECKING:
    from pathlib import Path

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "tests.checkpoint.test_kill"])
EVENTS = {"open", "os.rename", "os.mkdir", "os.link", "os.truncate", "os.utime"}
"""What Python tells an audit hook just before it changes a file system."""


def state(step: int) -> dict[str, torch.Tensor]:
    """The training's tensors at a step: everything follows from the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(20_000, generator=generator),
        "optim/w/step": torch.tensor(float(step)),
        "keep/x": torch.randn(7, generator=generator),
    }


def tell(log: Path, *values: object) -> None:
    """Append a line at once: it stays when this process is killed in the next instant."""
    with log.open("ab", buffering=0) as file:
        file.write((" ".join(map(str, values)) + "\n").encode())


def told(log: Path) -> int:
    """The last step that a process knew to be committed."""
    lines = log.read_text().split() if log.exists() else []
    return max(map(int, lines), default=0)


def train(comm: Comm, run_dir: Path, log: Path) -> None:
    """Resume from the newest checkpoint and save at every step, for ever."""
    saver = checkpointer(run_dir, comm, keep=Keep(last=2, best=1))
    path, _ = newest(run_dir, comm)
    step = 0 if path is None else read_train(path)["step"]
    if path is not None:
        tensors = state(0)
        load(path, tensors, comm)
        assert same(tensors, state(step)), "resumed with another state than was saved"
    while True:
        step += 1
        saver.save(state(step), {"step": step}, facts(step, best=step % 7 == 0))
        for outcome in saver.poll():
            assert outcome.error is None, outcome.error
            if comm.rank == 0:
                tell(log, outcome.step)


def alone(run_dir: Path, log: Path) -> None:
    """A training of one process."""
    train(Alone(), run_dir, log)


def ranked(rank: int, store: Path, run_dir: Path, log: Path) -> None:
    """One of two ranks of a training."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    train(Ranks(dist.new_group(backend="gloo", timeout=timeout), timeout), run_dir, log)


def check(run_dir: Path, log: Path) -> int:
    """After a kill: what was committed is there, whole and right, and the next owner finds nothing half done."""
    owner = claim(run_dir, run_id="check")
    owner.release()
    path, skipped = newest(run_dir, Alone())
    assert not skipped
    last = told(log)
    if path is None:
        assert last == 0
        return 0
    step = read_train(path)["step"]
    assert step >= last, f"step {last} was committed, the newest is {step}"
    assert [problem for other in committed(run_dir) for problem in verify(other)] == []
    tensors = state(0)
    load(path, tensors, Alone())
    assert same(tensors, state(step))
    assert [entry.name for entry in (run_dir / FOLDER).iterdir() if entry.name.startswith(".step")] == []
    return int(step)


def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    """B056: SIGKILL at twenty random instants of a training that saves all the time: nothing committed is lost."""
    run_dir, log, dice, steps = tmp_path / "run", tmp_path / "log", random.Random(20), [0]
    for _ in range(20):
        process = FORK.Process(target=alone, args=(run_dir, log))
        process.start()
        time.sleep(dice.uniform(0.02, 0.5))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the training ended by itself"
        steps.append(check(run_dir, log) if run_dir.exists() else 0)
    assert steps == sorted(steps)
    assert steps[-1] > 20


def test_kills_of_two_ranks_lose_nothing(tmp_path: Path) -> None:
    """B056: both ranks killed at random instants, one a moment after the other: nothing committed is lost."""
    run_dir, log, dice, last = tmp_path / "run", tmp_path / "log", random.Random(2), 0
    for attempt in range(6):
        store = tmp_path / f"store{attempt}"
        ranks = [FORK.Process(target=ranked, args=(rank, store, run_dir, log)) for rank in range(2)]
        for process in ranks:
            process.start()
        time.sleep(dice.uniform(0.5, 1.5))
        for process in dice.sample(ranks, 2):
            process.kill()
            time.sleep(dice.uniform(0, 0.05))
        for process in ranks:
            process.join()
        step = check(run_dir, log) if run_dir.exists() else 0
        assert step >= last
        last = step
    assert last > 5


def die_at(count: int, run_dir: Path, log: Path) -> None:
    """Save, replace and delete; die at the `count`-th change of the run folder."""
    left = [count]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        # Trees are removed with names relative to an open folder.
        removal = event in ("os.remove", "os.rmdir")
        if removal or (event in EVENTS and any(str(run_dir) in str(word) for word in given)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    saver = checkpointer(run_dir, Alone(), keep=Keep(last=1, best=1))
    sys.addaudithook(hook)
    for step, train_state in ((2, {"step": 2}), (3, {"step": 3}), (3, {"step": 3, "again": True}), (4, {"step": 4})):
        saver.save(state(step), train_state, facts(step, best=step == 3), wait=True)
        for outcome in saver.poll():
            assert outcome.error is None, outcome.error
            tell(log, outcome.step)
    os._exit(0)


def test_dying_at_every_change_of_the_folder_loses_nothing(tmp_path: Path) -> None:
    """B056: a process that dies before its n-th open, rename, link or removal, for every n: nothing committed is lost."""
    for count in range(1, 500):
        run_dir, log = tmp_path / str(count), tmp_path / f"{count}.log"
        process = FORK.Process(target=die_at, args=(count, run_dir, log))
        process.start()
        process.join()
        step = check(run_dir, log)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert count > 60, "too few instants were tried"
    assert step == 4


def half(run_dir: Path) -> None:
    """Begin a save and die with half a tensor file written."""
    from worldsize.checkpoint import disk

    real = disk.Recorder.write

    def write(self: Any, data: Any) -> int:
        if self.tell() > 20_000:
            os._exit(9)
        return real(self, data)

    disk.Recorder.write = write  # type: ignore[method-assign]  # this process is thrown away
    saver = checkpointer(run_dir, Alone())
    saver.save(state(2), {"step": 2}, facts(2), wait=True)


def test_half_a_file_is_never_a_checkpoint(tmp_path: Path) -> None:
    """B056: a process that dies in the middle of a file leaves the old checkpoint as the newest."""
    saver = checkpointer(tmp_path / "run", Alone())
    saver.save(state(1), {"step": 1}, facts(1), wait=True)
    saver.close()
    assert saver._owner
    saver._owner.release()
    process = FORK.Process(target=half, args=(tmp_path / "run",))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert newest(tmp_path / "run", Alone()) == (path_of(tmp_path / "run", 1), [])
    assert check(tmp_path / "run", tmp_path / "log") == 1


def test_a_living_training_keeps_others_out(tmp_path: Path) -> None:
    """A second start beside a living training is refused; after its death it goes on from its last commit."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    process = FORK.Process(target=alone, args=(run_dir, log))
    process.start()
    while not log.exists():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=f"pid {process.pid}"):
        claim(run_dir, run_id="second")
    process.kill()
    process.join()
    assert check(run_dir, log) >= 1
    steps = [step_of(path) for path in committed(run_dir)]
    assert [read(path).step for path in committed(run_dir)] == steps
