"""Room: run.json, which says what the training is; written by its first attempt, compared by every other."""

from __future__ import annotations

import json
import platform
import sys
import uuid
from typing import TYPE_CHECKING, Any

import torch

from worldsize.checkpoint import disk
from worldsize.errors import CheckpointError, LayoutError
from worldsize.runtime.comm import decide

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.runtime.comm import Comm
    from worldsize.train.settings import Settings


class RunFolder:
    """The run folder's own description."""

    def __init__(self, path: Path) -> None:
        self._file = path / "run.json"

    def read(self) -> dict[str, Any]:
        """What run.json says; empty where there is none. Raises CheckpointError where it is damaged."""
        if not self._file.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{self._file} is damaged", found=str(error), do="restore it, or use a new folder"
            ) from error
        return found

    def begin(self, settings: Settings, order: dict[str, Any]) -> list[str]:
        """Describe a new run, or compare with what its first attempt described.

        Args:
            settings: what decides the training.
            order: how the data's order comes about, for the ledger.

        Returns:
            a line for each accepted change, which is in run.json now.

        Raises:
            LayoutError: it would be another training.
        """
        before, now = self.read(), settings.frozen()
        if not before:
            body = {
                "id": uuid.uuid4().hex,
                "command": [sys.executable, *sys.argv],
                "config": now,
                "order": order,
                "data": None,
            }
            self._write({**body, "environment": environment()})
            return []
        notes = settings.refuse_changes(before["config"], now)
        if before["config"].get("duration") != now["duration"]:
            notes.append(f"duration changed from {before['config'].get('duration')} to {now['duration']}")
        if notes or before["config"] != now:
            self._write({**before, "config": now})
        return [f"{note}; run.json says so from now on" for note in notes]

    def add(self, part: str, values: dict[str, Any]) -> None:
        """Put values into a part of it."""
        body = self.read()
        self._write({**body, part: {**body.get(part, {}), **values}})

    def same_data(self, comm: Comm, settings: Settings, data: dict[str, Any]) -> list[str]:
        """Compare the data's fingerprint with the first attempt's. Collective.

        Raises:
            LayoutError: it is other data, and `accept=` does not name it.
        """
        return decide(comm, lambda: self._same_data(settings, data))

    def _same_data(self, settings: Settings, data: dict[str, Any]) -> list[str]:
        body = self.read()
        before = body.get("data")
        if before == data:
            return []
        self._write({**body, "data": data})
        if before is None:
            return []
        if "data" not in settings.accept:
            self._write(body)
            raise LayoutError(
                "the dataset is not the one this run was begun with",
                found=f"began with {before}, now {data}",
                do="restore it, choose another run folder, or accept=('data',)",
            )
        return [f"the dataset changed from {before} to {data}, accepted"]

    def _write(self, body: dict[str, Any]) -> None:
        disk.replace(self._file, json.dumps(body, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Versions that a result may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }
