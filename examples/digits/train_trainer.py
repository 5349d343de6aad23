"""The same training from its parts: python examples/digits/train_trainer.py runs/digits-trainer (or worldsize run)."""

from __future__ import annotations

import sys

from digits import Net, load
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import worldsize as ws

train_set, eval_set = load()
ws.Trainer(
    model=Net,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda model: AdamW(model.parameters(), 5e-3),
    schedule=CosineAnnealingLR,
    data=train_set,
    eval_data=eval_set,
    metrics={"accuracy": ws.accuracy},
    best="accuracy",
    clip=1.0,
    global_batch=64,
    micro_batch=8,
    duration="6ep",
    run_dir=sys.argv[1],
).fit()
