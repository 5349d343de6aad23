"""Learn to read handwritten digits: a loop of one's own over `ws.Run`.

    python examples/digits/train.py runs/digits                                       one process
    worldsize run --nproc-per-node 2 examples/digits/train.py runs/digits             two, DDP
    worldsize run --nproc-per-node 3 --strategy fsdp examples/digits/train.py runs/digits

Stop it as you like and start any of these lines again: it goes on with the next sample.
"""

from __future__ import annotations

import argparse

import torch
from digits import Net, load
from torch.nn.functional import cross_entropy

import worldsize as ws


def main() -> None:
    """Train, evaluate after each epoch."""
    args = arguments()
    train_set, eval_set = load()
    run = ws.Run(
        args.run_dir,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        duration=args.duration,
        precision=args.precision,
        saving=ws.Saving(every=args.save_every),
        data=train_set,
    )
    model = run.model(Net)
    optimizer = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), args.lr), model, clip=1.0)
    run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, run.total_steps))
    for step in run.steps():
        for images, labels in step.micro_batches:
            step.backward(cross_entropy(model(images), labels, reduction="none"))
        step.update()
        if step.ends_epoch:
            scores = run.evaluate(lambda batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]}, eval_set)
            run.log(scores)
            run.best(scores["accuracy"])


def arguments() -> argparse.Namespace:
    """What can be chosen. The batches belong to the training, not to the machine: keep them when you resume."""
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("run_dir", help="the run folder; started again, training goes on where it stood")
    parser.add_argument("--duration", default="6ep", help="6ep (epochs), 150st (steps), 10ksa (samples)")
    parser.add_argument("--global-batch", type=int, default=64, help="samples of a step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of a forward pass on one rank")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--precision", default="fp32", help="fp32, fp64, bf16 or fp16")
    parser.add_argument("--save-every", default="1ep", help="between checkpoints: 1ep, 10st")
    return parser.parse_args()


if __name__ == "__main__":
    main()
