"""One PyTorch training program, any world size.

`import worldsize as ws` loads nothing but this file: every name loads its room on first use, so that the launch half
never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "Run": "worldsize.train.run",
    "Trainer": "worldsize.train.trainer",
    "accuracy": "worldsize.train.criterion",
    "Saving": "worldsize.train.settings",
    "Track": "worldsize.track.spec",
    "Stall": "worldsize.train.settings",
    "Duration": "worldsize.config",
    "Step": "worldsize.train.step",
    "World": "worldsize.world",
    "here": "worldsize.runtime.env",
    "WorldsizeError": "worldsize.errors",
    "LayoutError": "worldsize.errors",
    "committed": "worldsize.runtime.report",
    "stop_requested": "worldsize.runtime.report",
    "spawn": "worldsize.launch.spawn",
    "job": "worldsize.launch.functions.function",
    "slurm_fn": "worldsize.launch.functions.function",
    "SlurmConfig": "worldsize.launch.functions.config",
    "data": "worldsize.data",
}

if TYPE_CHECKING:
    from worldsize import data
    from worldsize.config import Duration
    from worldsize.errors import LayoutError, WorldsizeError
    from worldsize.launch.functions.config import SlurmConfig
    from worldsize.launch.functions.function import job, slurm_fn
    from worldsize.launch.spawn import spawn
    from worldsize.runtime.env import here
    from worldsize.runtime.report import committed, stop_requested
    from worldsize.track.spec import Track
    from worldsize.train.criterion import accuracy
    from worldsize.train.run import Run
    from worldsize.train.settings import Saving, Stall
    from worldsize.train.step import Step
    from worldsize.train.trainer import Trainer
    from worldsize.world import World

__all__ = [  # noqa: RUF022 - in the order in which a program meets them
    "Run", "Trainer", "Saving", "Stall", "Track", "Step", "accuracy", "data", "Duration", "committed", "stop_requested",
    "spawn", "job",
    "slurm_fn", "SlurmConfig", "World", "here", "WorldsizeError", "LayoutError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'worldsize' has no attribute {name!r}")
    if name in ("Run", "Trainer"):
        import_module("worldsize.runtime.signals").expect()
    module = import_module(_NAMES[name])
    return module if name == "data" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
