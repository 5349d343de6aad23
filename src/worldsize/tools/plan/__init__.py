"""What a training needs, before it is queued: memory, batches, traffic, checkpoints, for layouts that need not be here.

The user's own program runs for two steps in one process that poses as a rank of the planned world: its tensors have shapes
and no memory (torch's fake tensors), its collectives go nowhere (torch's fake process group), and what would be live on a
GPU is counted. Nothing is estimated that can be run: sharding, schedules, recomputation and accumulation are the real code.
"""
