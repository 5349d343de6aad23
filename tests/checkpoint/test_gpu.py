from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.checkpoint.states import blank, checkpointer, facts, odd, path_of, same, save_once
from tests.pools import together
from worldsize.checkpoint.load import load
from worldsize.checkpoint.manifest import verify
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.runtime.comm import Comm


def on(device: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors elsewhere."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.gpu(count=1)
def test_from_a_device_and_back(tmp_path: Path) -> None:
    """Tensors on a device come back bit for bit, there and on the host."""
    outcome = save_once(tmp_path, Alone(), on("cuda", odd(1)), 1)
    assert outcome.error is None
    for device in ("cuda", "cpu"):
        found = on(device, blank(odd()))
        load(outcome.path, found, Alone())
        assert same(on("cpu", found), odd(1))


@pytest.mark.gpu(count=1)
def test_training_goes_on_while_it_is_written_from_a_device(tmp_path: Path) -> None:
    """What the training queues on the device right after `save` is not in the checkpoint."""
    tensors = {f"model/{index}": torch.full((1_000_000,), float(index), device="cuda") for index in range(20)}
    saver = checkpointer(tmp_path, Alone())
    saver.prepare(tensors)
    saver.save(tensors, {}, facts(1))
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    saver.wait()
    saver.close()
    load(path_of(tmp_path, 1), tensors, Alone())
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[float(index)] for index in range(20)]


@pytest.mark.gpu(count=1)
def test_later_copies_run_beside_the_training(tmp_path: Path) -> None:
    """What was promised to stay until `hold` may be changed right after it, and is saved as it was."""
    tensors = {f"optim/{index}": torch.full((4_000_000,), float(index), device="cuda") for index in range(40)}
    saver = checkpointer(tmp_path, Alone())
    saver.prepare(tensors)
    for step in (1, 2):
        saver.save(tensors, {"step": step}, facts(step), later=tensors)
        saver.hold()
        for tensor in tensors.values():
            tensor.add_(100.0)
    assert [outcome.error for outcome in saver.wait()] == [None, None]
    saver.close()
    load(path_of(tmp_path, 2), tensors, Alone())
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[100.0 + index] for index in range(40)]


@pytest.mark.gpu(count=1)
def test_what_is_changed_before_hold_is_not_committed(tmp_path: Path) -> None:
    """A broken promise costs that save, and is told."""
    tensors = {"optim/0": torch.ones(50_000_000, device="cuda")}
    saver = checkpointer(tmp_path, Alone())
    saver.prepare(tensors)
    saver.save(tensors, {}, facts(1), later=tensors)
    tensors["optim/0"].zero_()
    saver.hold()
    (outcome,) = saver.wait()
    saver.close()
    assert "changed while it was copied" in str(outcome.error)
    assert not path_of(tmp_path, 1).exists()


def two_devices(comm: Comm, run_dir: Path) -> list[int]:
    """FSDP2-like shards on two devices; returns which devices this process holds memory on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.cuda.set_device(comm.rank)
    mesh = init_device_mesh("cuda", (comm.size,))
    whole = torch.arange(1_000_003, device="cuda", dtype=torch.float32)
    shards = {"model/w": distribute_tensor(whole, mesh, [Shard(0)]), "model/b": torch.ones(5, device="cuda")}
    saver = checkpointer(run_dir, comm)
    saver.save(shards, {}, facts(1), later=["model/w"])
    saver.hold()
    (outcome,) = saver.wait()
    saver.close()
    if saver._owner:
        saver._owner.release()
    assert outcome.error is None, outcome.error
    found = {
        "model/w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]),
        "model/b": torch.zeros(5).cuda(),
    }
    load(path_of(run_dir, 1), found, comm)
    assert torch.equal(found["model/w"].full_tensor(), whole)  # type: ignore[attr-defined]
    has_context = vars(torch._C)["_cuda_hasPrimaryContext"]
    return [index for index in range(comm.size) if has_context(index)]


@pytest.mark.gpu(count=2)
def test_shards_on_two_devices(tmp_path: Path) -> None:
    """Shards on two devices save and load; saving in the background takes no memory on another rank's device."""
    assert together(two_devices, 2, tmp_path / "run", device="cuda") == [[0], [1]]
    assert verify(path_of(tmp_path / "run", 1)) == []
