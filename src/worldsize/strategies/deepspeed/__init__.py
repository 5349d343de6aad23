"""ZeRO by DeepSpeed: stages 0 to 3 and offload, from the same program and into the same checkpoints as every other layout.

`config` settles DeepSpeed's JSON, `strategy` drives its engine, `fragments` knows where its partitions lie, `optimizer` is
what a program holds in the place of its own one. Checkpoints that DeepSpeed itself wrote are read in `checkpoint/zero.py`.
"""
