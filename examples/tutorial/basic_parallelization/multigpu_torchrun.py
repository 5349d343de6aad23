"""All GPUs of this machine, started by torchrun or by `worldsize run`; killed and started again, it goes on.

torchrun --standalone --nproc_per_node=gpu multigpu_torchrun.py --total_epochs 50 --save_every 10 --batch_size 32
worldsize run --nproc-per-node gpu multigpu_torchrun.py --total_epochs 50 --save_every 10 --batch_size 32
"""

from __future__ import annotations

from singlegpu import arguments, train

if __name__ == "__main__":
    train(**vars(arguments("runs/multigpu_torchrun").parse_args()))
