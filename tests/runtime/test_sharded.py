"""What is sharded is known without loading what shards; a training that shards nothing loads it late, or never."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from worldsize.runtime.sharded import is_sharded, local

if TYPE_CHECKING:
    from pathlib import Path

STEP = """
import sys
import torch, worldsize as ws
def loaded(): return [name for name in ("tensor", "checkpoint") if f"torch.distributed.{name}" in sys.modules]
run = ws.Run(sys.argv[1], global_batch=2, micro_batch=2, duration="1st", strategy=sys.argv[2], device="cpu")
model = run.model(lambda: torch.nn.Linear(2, 1))
print(loaded())
run.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), model)
for step in run.steps(torch.utils.data.TensorDataset(torch.ones(2, 2))):
    for (x,) in step.micro_batches:
        step.backward(model(x).squeeze(1))
    step.update()
    print(loaded()[1:])
"""


def answer(code: str, *arguments: str) -> list[str]:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_plain_tensor_is_whole() -> None:
    """It is not sharded, and all of it is here."""
    tensor = torch.ones(2)
    assert not is_sharded(tensor)
    assert local(tensor) is tensor


def test_a_sharded_tensor_is_seen() -> None:
    """A DTensor is, and this rank's part of it is a plain tensor."""
    code = """
import torch, torch.distributed as dist
from worldsize.runtime.sharded import is_sharded, local
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
print(is_sharded(tensor), type(local(tensor)).__name__)
"""
    assert answer(code) == ["True Tensor"]


def test_a_part_lies_in_what_is_made_like_another() -> None:
    """Itself, not a copy: an offloaded one stays where the next step changes it."""
    code = """
import torch, torch.distributed as dist
from worldsize.runtime.sharded import held, like
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
whole = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
part = torch.zeros(2, dtype=torch.float64)
made = like(part, whole)
print(held(made) is part, made.dtype, made._spec == torch.zeros_like(whole, dtype=torch.float64)._spec)
"""
    assert answer(code) == ["True torch.float64 True"]


def test_training_modules_load_no_sharding() -> None:
    """Importing all that a single or ddp training is made of loads neither DTensor nor torch's checkpoints."""
    code = "import sys, worldsize.train.run, worldsize.train.trainer, worldsize.strategies.ddp\n"
    code += "print([name for name in ('tensor', 'checkpoint', 'fsdp') if f'torch.distributed.{name}' in sys.modules])"
    assert answer(code) == ["[]"]


def test_single_loads_it_late(tmp_path: Path) -> None:
    """No DTensor before torch's own first optimizer, which brings it, and no checkpoints of torch before the first step."""
    assert [line for line in answer(STEP, str(tmp_path), "single") if line.startswith("[")] == ["[]", "[]"]
