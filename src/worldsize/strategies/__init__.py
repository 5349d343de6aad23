"""How models and the work are laid over ranks. One file a strategy, imported when it is named.

| name | what is where | idle ranks |
|---|---|---|
| single | everything in one process | cannot be |
| ddp | a whole model on each rank; gradients summed (torch DistributedDataParallel) | need one forward and backward a step |
| fsdp | parameters, gradients and optimizer state in shards (torch FSDP2, `fully_shard`) | need as many as the busiest rank |

A strategy changes neither class, attributes nor parameter names of the user's model: what a checkpoint holds is the bare
model under every strategy. Third parties add theirs through the entry point group `worldsize.strategies`.
"""
