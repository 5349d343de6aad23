"""The training itself: `Run` (write the loop) and `Trainer` (give the parts), one engine under both.

`run` is the front; `loop` asks for the next step, commits, agrees and stops; `step` weights and exchanges; `state` is
what a checkpoint holds; `evaluate` counts each sample once. Nothing here knows a launcher or a strategy by name.
"""
