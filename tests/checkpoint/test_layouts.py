from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoint.states import (
    blank,
    checkpointer,
    facts,
    full,
    hybrid,
    loads_as,
    path_of,
    same,
    save_once,
    sharded,
)
from tests.pools import together
from worldsize.checkpoint import store
from worldsize.checkpoint.load import load, newest
from worldsize.checkpoint.manifest import FOLDER, committed, read, verify
from worldsize.checkpoint.retain import Keep
from worldsize.errors import CheckpointError, OwnershipError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.runtime.comm import Comm

KEEP = Keep(last=9)
LAYOUTS: dict[int, Any] = {1: sharded, 2: lambda tensors, comm: sharded(tensors, comm, 1), 3: hybrid}


def replicated(tensors: dict[str, torch.Tensor], _: Comm) -> dict[str, torch.Tensor]:
    """Every rank has everything, as under DDP."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def write_all(comm: Comm, run_dir: Path) -> dict[str, Any]:
    """On four ranks: three layouts, tied shards, and a fifth checkpoint under DDP with its files' sizes."""
    for step, layout in LAYOUTS.items():
        save_once(run_dir, comm, layout(full(step), comm), step, keep=KEEP)
    tensors = sharded(full(4), comm)
    tensors["model/tied"] = tensors["model/w"].detach()
    tensors["model/tied.row"] = tensors["model/row"].detach()
    save_once(run_dir, comm, tensors, 4, keep=KEEP)
    big = {f"model/{index}": torch.full((1000,), float(index)) for index in range(8)}
    outcome = save_once(run_dir, comm, big, 5, keep=KEEP)
    return {"error": outcome.error, "path": outcome.path, "prefix": sorted(read(outcome.path).files)}


def read_all(comm: Comm, run_dir: Path) -> dict[str, bool]:
    """Every checkpoint read as every layout this many ranks can have."""
    layouts = {"replicated": replicated, "rows": sharded, "columns": LAYOUTS[2]}
    if comm.size % 2 == 0:
        layouts["hybrid"] = hybrid
    found = {}
    for step in LAYOUTS:
        for name, layout in layouts.items():
            found[f"{step} as {name}"] = loads_as(path_of(run_dir, step), comm, full(step), layout)
    path, skipped = newest(run_dir, comm)
    found["newest"] = path == path_of(run_dir, 5) and not skipped
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints were written by four ranks in several layouts."""
    folder = tmp_path_factory.mktemp("layouts") / "run"
    outcomes = together(write_all, 4, folder)
    assert [outcome["error"] for outcome in outcomes] == [None] * 4
    return folder


def test_what_four_ranks_wrote_is_whole(run_dir: Path) -> None:
    """Every checkpoint verifies, with pieces that were empty on some ranks."""
    assert [verify(path) for path in committed(run_dir)] == [[]] * 5


def test_one_process_reads_them_all(run_dir: Path) -> None:
    """B087: what any layout of four ranks wrote, one process without a process group loads."""
    for step in LAYOUTS:
        found = blank(full())
        load(path_of(run_dir, step), found, Alone())
        assert same(found, full(step))


@pytest.mark.parametrize("size", [2, 3])
def test_other_rank_counts_read_them_all(run_dir: Path, size: int) -> None:
    """B087: 4 -> 2 and 4 -> 3 ranks, every layout read as every layout, bit for bit."""
    for found in together(read_all, size, run_dir):
        assert all(found.values()), found


def test_replicas_share_the_writing(run_dir: Path) -> None:
    """What all ranks hold is written once, each rank its part."""
    files = read(path_of(run_dir, 5)).files
    sizes = [files[f"__{rank}_0.distcp"].size for rank in range(4)]
    assert max(sizes) < 1.1 * min(sizes)
    assert sum(sizes) < 1.5 * 8 * 4000


def test_tied_shards_are_saved_once(run_dir: Path) -> None:
    """Ties are found although some ranks hold nothing of a tensor."""
    assert read(path_of(run_dir, 4)).aliases == {"model/tied": "model/w", "model/tied.row": "model/row"}
    expected = full(4) | {"model/tied": full(4)["model/w"], "model/tied.row": full(4)["model/row"]}
    found = blank(expected)
    load(path_of(run_dir, 4), found, Alone())
    assert same(found, expected)


def told(work: Any) -> str:
    """The error that a call raises, as text."""
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__} {error}"
    return ""


def disagree(comm: Comm, run_dir: Path) -> dict[str, Any]:
    """Things that go wrong on one of two ranks only."""
    saver = checkpointer(run_dir, comm, keep=KEEP)
    found: dict[str, Any] = {}
    plain = {"model/w": torch.ones(4)}
    more = plain | ({"model/x": torch.ones(1)} if comm.rank else {})
    other = {"model/w": torch.ones(4 + comm.rank)}
    found["train"] = told(lambda: saver.save(plain, {"lr": comm.rank}, facts(1)))
    found["step"] = told(lambda: saver.save(plain, {}, facts(1 + comm.rank)))
    found["names"] = told(lambda: saver.save(more, {}, facts(1)))
    found["shape"] = told(lambda: saver.save(other, {}, facts(1)))
    found["plain"] = told(lambda: saver.save(plain, {"x": (1,) if comm.rank else [1]}, facts(1)))
    write = store.write
    if comm.rank:
        store.write = fail  # type: ignore[assignment]  # this process is thrown away
    saver.save(plain, {}, facts(2), wait=True)
    store.write = write
    found["write"] = [str(outcome.error) for outcome in saver.poll()]
    comm.barrier()
    found["left"] = sorted(path.name for path in (run_dir / FOLDER).iterdir())
    comm.barrier()
    saver.save(plain, {}, facts(3), wait=True)
    found["then"] = [outcome.error for outcome in saver.poll()]
    wrong = {"model/w": torch.zeros(4 + comm.rank)}
    found["load"] = told(lambda: load(path_of(run_dir, 3), wrong, comm))
    saver.close()
    return found


def fail(*_: Any) -> None:
    """A disk without space, on one rank."""
    raise OSError(28, "No space left on device")


def test_a_rank_that_differs_or_fails_stops_nobody(tmp_path: Path) -> None:
    """B057, B061: what differs or fails on one rank is one error on all, naming the rank; nobody hangs."""
    one, other = together(disagree, 2, tmp_path / "run")
    assert one == other
    assert "ranks 0 and 1 have other values for train['lr']" in one["train"]
    assert "facts['step']" in one["step"]
    assert "such as model/x" in one["names"]
    assert "[4] torch.float32 on rank 0, [5] torch.float32 on rank 1" in one["shape"]
    assert "rank 1: train['x'][0]" in one["plain"] or "rank 1: train['x'] is not a plain value" in one["plain"]
    assert len(one["write"]) == 1
    assert "rank 1: writing" in one["write"][0]
    assert "No space left" in one["write"][0]
    assert one["left"] == []
    assert one["then"] == [None]
    assert "rank 1: " in one["load"]


def cut_off(comm: Comm, run_dir: Path) -> list[str]:
    """Rank 0 loses the run folder to a successor between two saves."""
    from worldsize.checkpoint.owner import claim

    saver = checkpointer(run_dir, comm)
    saver.save({"model/w": torch.ones(4)}, {}, facts(1), wait=True)
    if comm.rank == 0:
        claim(run_dir, run_id="successor")
    comm.barrier()
    found = told(lambda: saver.save({"model/w": torch.ones(4)}, {}, facts(2), wait=True))
    saver.close()
    comm.barrier()
    return [found, *(path.name for path in (run_dir / FOLDER).iterdir())]


def test_all_ranks_hear_that_they_were_cut_off(tmp_path: Path) -> None:
    """The rank that owns the folder notices its successor; all ranks stop with the same error."""
    for found in together(cut_off, 2, tmp_path / "run"):
        assert found[0].startswith(OwnershipError.__name__)
        assert found[1:] == ["step-00000001"]


def alone_in_save(comm: Comm, run_dir: Path) -> float:
    """Only rank 0 calls save, although all ranks must."""
    from datetime import timedelta

    import torch.distributed as dist

    from worldsize.runtime.comm import Ranks

    timeout = timedelta(seconds=3)
    short = Ranks(dist.new_group(backend="gloo", timeout=timeout), timeout)
    saver = checkpointer(run_dir, short)
    began = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(CheckpointError, match="not all ranks came to this save"):
            saver.save({"model/w": torch.ones(4)}, {}, facts(1))
    waited = time.monotonic() - began
    comm.barrier()
    return waited


def test_saving_on_one_rank_only_ends(tmp_path: Path) -> None:
    """B061: a save that not all ranks call raises within the timeout instead of hanging."""
    assert together(alone_in_save, 2, tmp_path / "run")[0] < 20
