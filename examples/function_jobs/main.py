"""The training function of nntool's documentation, with the import changed: a job of two nodes.

accelerate launch starts the ranks of each node, with its --config_file: ddp.yaml or fsdp2.yaml.
"""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from worldsize import SlurmConfig, slurm_fn


def data() -> TensorDataset:
    """512 points on a noisy plane."""
    points = torch.randn(512, 16)
    return TensorDataset(points, points.sum(1, keepdim=True) + 0.1 * torch.randn(512, 1))


def sharded_by_hand(accelerator: Accelerator) -> bool:
    """Whether FSDP2 is asked for where accelerate knows DDP only: on CPUs it is torch's own there."""
    several = accelerator.device.type == "cpu" and accelerator.num_processes > 1
    return several and os.environ.get("ACCELERATE_USE_FSDP") == "true"


@slurm_fn
def main(config: SlurmConfig) -> dict[str, object]:
    """Train, and say where and how."""
    accelerator = Accelerator()
    set_seed(2024)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    by_hand = sharded_by_hand(accelerator)
    if by_hand:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training_dataloader = DataLoader(data(), batch_size=16, shuffle=True)
    if by_hand:
        optimizer, training_dataloader = accelerator.prepare(optimizer, training_dataloader)
    else:
        model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
    losses = []
    for _ in range(3):
        for points, targets in training_dataloader:
            loss = nn.functional.mse_loss(model(points), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        accelerator.print(f"loss {losses[-1]:.4f}")
    parameter = type(next(model.parameters())).__name__
    # DDP goes before its process group: torch 2.13 may hang where it is the last to hold one of gloo.
    accelerator.free_memory()
    del model
    accelerator.end_training()
    return {"job": config.job_name, "ranks": accelerator.num_processes, "parameter": parameter, "losses": losses}


if __name__ == "__main__":
    slurm_config = SlurmConfig.from_args(
        sys.argv[1:],
        mode="slurm",
        job_name="function",
        num_of_node=2,
        tasks_per_node=1,
        processes_per_task=2,
        use_distributed_env=True,
        distributed_launch_command="accelerate launch --config_file ddp.yaml --num_processes {num_processes} "
        "--num_machines {num_machines} --machine_rank {machine_rank} --main_process_ip {main_process_ip} "
        "--main_process_port {main_process_port} main.py",
    )
    print(main[slurm_config](slurm_config).result())
