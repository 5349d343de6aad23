"""Room: the small training as a `Run`."""

from __future__ import annotations

import sys

import torch
from small import BATCH, SAVE_EVERY, STEPS, dataset, made, network
from torch.nn.functional import cross_entropy

import worldsize as ws

run = ws.Run(
    sys.argv[1],
    global_batch=2 * BATCH,
    micro_batch=BATCH,
    duration=f"{STEPS}st",
    saving=ws.Saving(every=f"{SAVE_EVERY}st"),
    device="cpu",
)
model = run.model(network)
run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), model)
for step in run.steps(dataset()):
    for x, y in step.micro_batches:
        step.backward(cross_entropy(model(x), y, reduction="none"))
    step.update()
    made(step.index)
