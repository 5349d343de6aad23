"""Room: the small training by hand, with a checkpoint of its own, as torchrun's tutorial has it."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from small import BATCH, SAVE_EVERY, STEPS, dataset, made, network
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
snapshot = Path(sys.argv[1]) / "snapshot.pt"
step = 0
if snapshot.exists():
    state = torch.load(snapshot, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
data = dataset()
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
while step < STEPS:
    sampler.set_epoch(step // len(loader))
    for x, y in islice(loader, step % len(loader), None):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        made(step)
        step += 1
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            beside = snapshot.with_suffix(".part")
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, beside
            )
            os.replace(beside, snapshot)  # noqa: PTH105 - one word for what happens
        if step == STEPS:
            break
dist.destroy_process_group()
