"""Room: trainings to save, small and odd, and a short way to save and to load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from worldsize.checkpoint.load import load
from worldsize.checkpoint.manifest import FOLDER, folder_name
from worldsize.checkpoint.owner import claim
from worldsize.checkpoint.save import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.checkpoint.save import Outcome
    from worldsize.runtime.comm import Comm

SHARDED = {"model/w": (7, 3), "model/b": (3,), "optim/w/exp_avg": (7, 3), "model/row": (1, 5)}


def odd(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind: no dimension, empty, bool, integers, bf16, complex, not contiguous."""
    torch.manual_seed(seed)
    return {
        "model/weight": torch.randn(5, 4),
        "model/t": torch.randn(4, 6).t(),
        "model/half": torch.randn(3).bfloat16(),
        "model/double": torch.randn(2, 2, dtype=torch.float64),
        "model/complex": torch.randn(2, dtype=torch.complex64),
        "model/step": torch.tensor(float(seed)),
        "model/none": torch.empty(0, 4),
        "keep/mask": torch.rand(9) > 0.5,
        "keep/rng": torch.randint(0, 255, (16,), dtype=torch.uint8),
        "keep/slice": torch.arange(20)[3:9],
    }


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same names, shapes and dtypes, all zero."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def facts(step: int, **more: Any) -> dict[str, Any]:
    """What a training says of itself at a step."""
    return {"step": step, "epoch": step // 10, "samples": 4 * step, "layout": {"strategy": "x"}, "exact": True} | more


def checkpointer(run_dir: Path, comm: Comm, **options: Any) -> Checkpointer:
    """A checkpointer whose rank 0 claims the folder."""
    owner = claim(run_dir, run_id="r") if comm.rank == 0 else None
    return Checkpointer(run_dir, comm, owner=owner, **options)


def save_once(run_dir: Path, comm: Comm, tensors: dict[str, torch.Tensor], step: int, **options: Any) -> Outcome:
    """One whole save by a new attempt."""
    saver = checkpointer(run_dir, comm, **options)
    saver.save(tensors, {"step": step}, facts(step), wait=True)
    (outcome,) = saver.poll()
    saver.close()
    if saver._owner:
        saver._owner.release()
    return outcome


def path_of(run_dir: Path, step: int) -> Path:
    """The folder of a step."""
    return run_dir / FOLDER / folder_name(step)


def full(seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a sharded training, whole, and two replicated ones."""
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) for name, shape in SHARDED.items()}
    return tensors | {"optim/w/step": torch.tensor(3.0), "keep/mean": torch.randn(4, dtype=torch.float64)}


def sharded(tensors: dict[str, torch.Tensor], comm: Comm, dim: int = 0) -> dict[str, torch.Tensor]:
    """The same tensors, those of `SHARDED` split over the ranks (some ranks get nothing of a small one)."""
    mesh = init_device_mesh("cpu", (comm.size,))
    return {
        name: distribute_tensor(tensor.clone(), mesh, [Shard(min(dim, tensor.ndim - 1))])
        if name in SHARDED
        else tensor.clone()
        for name, tensor in tensors.items()
    }


def hybrid(tensors: dict[str, torch.Tensor], comm: Comm) -> dict[str, torch.Tensor]:
    """The same, replicated over pairs and split inside them (HSDP)."""
    mesh = init_device_mesh("cpu", (comm.size // 2, 2))
    return {
        name: distribute_tensor(tensor.clone(), mesh, [Replicate(), Shard(0)]) if name in SHARDED else tensor.clone()
        for name, tensor in tensors.items()
    }


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor gathered from its pieces. Collective."""
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in tensors.items()}


def loads_as(path: Path, comm: Comm, expected: dict[str, torch.Tensor], layout: Any) -> bool:
    """Whether a checkpoint fills tensors of this layout with what is expected. Collective."""
    target = layout({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, comm)
    load(path, target, comm)
    return same(whole(target), expected)
