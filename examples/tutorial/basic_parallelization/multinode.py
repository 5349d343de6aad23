"""Several machines: the same command on each of them, with its own --node-rank. All must see the run folder.

    torchrun --nproc_per_node=8 --nnodes=2 --node-rank=0 --rdzv-id=456 --rdzv-backend=c10d \
        --rdzv-endpoint=[2001:db8::1]:29603 multinode.py --total_epochs 50 --save_every 10 --batch_size 32

`worldsize run` takes the same options.
"""

from __future__ import annotations

from singlegpu import arguments, train

if __name__ == "__main__":
    train(**vars(arguments("runs/multinode").parse_args()))
