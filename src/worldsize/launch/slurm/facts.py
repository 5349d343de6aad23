"""Room: small facts that one process leaves for others: a dataclass as JSON, there whole or not at all."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import DataclassInstance


def put(path: Path, fact: DataclassInstance) -> None:
    """Leave it there, in place of an older one. Folders are made, for their owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    part.write_text(json.dumps(asdict(fact)), encoding="utf-8")
    part.replace(path)


def get(path: Path) -> dict[str, Any]:
    """Its values by name. Raises FileNotFoundError, or ValueError where it is something else."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
