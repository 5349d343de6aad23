"""Room: how a training's speed grows with its ranks."""
