"""What a real Slurm 22.05 printed, and commands that print it again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.launch.slurm import nodes, states
from worldsize.launch.slurm.why import Around

if TYPE_CHECKING:
    from worldsize.launch.slurm.states import JobFacts

SEEN = Path(__file__).parent / "seen"


def text(name: str) -> str:
    """A recorded answer."""
    return (SEEN / f"22.05{name}").read_text(encoding="utf-8")


def queue() -> dict[str, JobFacts]:
    """The waiting and running jobs by id."""
    return {facts.job: facts for facts in states.parse_queue(text("-waiting.squeue"))}


def over() -> dict[str, JobFacts]:
    """Jobs as `squeue --states=all` tells them, most of them over, by name."""
    return {facts.name: facts for facts in states.parse_queue(text("-over.squeue"))}


def accounting() -> list[JobFacts]:
    """What sacct said."""
    return states.parse_accounting(text(".sacct"))


def around() -> Around:
    """The whole cluster."""
    partitions, found = nodes.parse_partitions(text(".partitions")), nodes.parse_nodes(text(".sinfo"))
    return Around(partitions, found, list(queue().values()))


def commands(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment whose PATH has only these shell scripts and the system's own commands."""
    for name, body in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
    return {"PATH": f"{folder}:/nowhere", "HOME": str(folder)}
