"""Room: checkpoints. What a run wrote down, whole or not at all, and readable by every layout.

`manifest`, `owner`, `retain` and `disk` import no torch, so that the launch half and the tools can use them;
`save`, `load`, `stage`, `store` and `weights` do. Nothing is imported here for that reason.
"""
