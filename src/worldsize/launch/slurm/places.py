"""Room: the places of one submitted job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class Where:
    """All absolute.

    Attributes:
        folder: the job's own folder, shared by all nodes: script, logs, exit records.
        python: the interpreter of the nodes, with worldsize in it.
        host_python: that of the batch script, where it is another one: outside of a container, say.
    """

    folder: PurePath
    python: str
    host_python: str | None = None
