"""Room: what an attempt is: who works where on what, how it was set, how long it shall go. For its first event."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from worldsize.runtime import origin
from worldsize.runtime.device import describe
from worldsize.train import code
from worldsize.train.folder import environment

if TYPE_CHECKING:
    from worldsize.checkpoint.owner import Owner
    from worldsize.data.batch import BatchPlan
    from worldsize.train.engine import Engine
    from worldsize.train.settings import Settings


def attempt(engine: Engine, settings: Settings, owned: Owner, cut: BatchPlan, total: int | None) -> dict[str, Any]:
    """Plain values. Collective."""
    here = engine.comm.gather((socket.gethostname(), describe(engine.device)))
    world, saving = engine.session.world, settings.saving
    return {
        "ranks": world.size,
        "hosts": list(dict.fromkeys(host for host, _ in here)),
        "devices": list(dict.fromkeys(device for _, device in here)),
        "launcher": world.launcher,
        "began": origin.began(owned.started),
        **origin.job(),
        "total": total,
        "steps_per_epoch": None if cut.length is None else cut.steps_per_epoch,
        "config": {
            **settings.frozen(), "strategy": engine.strategy.name, "accept": list(settings.accept),
            "save every": str(saving.every), "save every minutes": saving.every_minutes, "keep last": saving.keep_last,
            "save synchronously": saving.synchronous,
        },
        "environment": environment(),
        "code": code.fingerprint(),
    }  # fmt: skip
