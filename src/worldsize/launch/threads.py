"""Room: how many of a node's CPUs a rank that Slurm started may use, and whether it can use those it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "OMP_NUM_THREADS"


def share(environ: Mapping[str, str], allowed: int, *, tasks: int, ranks: int) -> dict[str, str]:
    """OMP_NUM_THREADS for each rank of a task; nothing where the user set it.

    Args:
        environ: of the task.
        allowed: CPUs that the system lets the task run on. Where tasks are not bound these are all of the node's.
        tasks: tasks of the step on this node.
        ranks: ranks that this task starts; 1 where it is one.
    """
    if environ.get(NAME):
        return {}
    whole = environ.get("SLURM_CPUS_ON_NODE", "")
    stated = _stated(environ) or (int(whole) // tasks if whole.isdigit() else allowed)
    return {NAME: str(max(1, min(allowed, stated) // ranks))}


def narrow(environ: Mapping[str, str], allowed: int) -> str | None:
    """What to tell where a task may run on fewer CPUs than it was given (B014)."""
    stated = _stated(environ)
    if stated is None or allowed >= stated:
        return None
    return (
        f"this task was given {stated} CPUs and may run on {allowed} of them: loaders and threads share those. "
        "Do: set cpu_bind: none, or see what binds it (SLURM_CPU_BIND, a wrapper)."
    )


def _stated(environ: Mapping[str, str]) -> int | None:
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(text) if text.isdigit() and int(text) else None
