"""Room: the environment of a rank: torchrun's contract, our own variables, what must not leak into it. No torch."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from worldsize.launch.plan import Plan, Share

_HIDDEN = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP", "SLURM_DISTRIBUTION", "SLURM_PTY_", "SLURM_PMI",
    "OMPI_", "PMI_", "PMIX_", "PMI2_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_", "PALS_",
    "TORCHELASTIC_",
)  # fmt: skip
"""Beginnings of names that speak of another launcher's ranks: libraries would believe them."""

_KEPT = ("OMPI_MCA_", "PMIX_MCA_")
"""The user's own settings for MPI."""


@contextmanager
def without_plugins() -> Iterator[None]:
    """In this block pydantic looks for no plugins of our models, which takes longer the more packages are installed."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def read() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def become(values: Mapping[str, str]) -> None:
    """Make `values` this process's whole environment."""
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def without_ranks(base: Mapping[str, str]) -> dict[str, str]:
    """An environment without what speaks of another launcher's ranks."""
    return {name: value for name, value in base.items() if name.startswith(_KEPT) or not name.startswith(_HIDDEN)}


def for_rank(base: Mapping[str, str], plan: Plan, share: Share, local_rank: int, folder: Path) -> dict[str, str]:
    """Everything that rank `share.first_rank + local_rank` finds in its environment.

    Args:
        base: the supervisor's own environment.
        plan: what is started.
        share: this node's place in the attempt.
        local_rank: the rank on this node.
        folder: where the logs of this attempt are.
    """
    from worldsize.runtime.visible import threads_per_rank

    env = without_ranks(base)
    threads = threads_per_rank(base, len(os.sched_getaffinity(0)), share.nproc)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    return env | dict(plan.options) | _contract(plan, share, local_rank) | _ours(plan, share, local_rank, folder)


def reachable(base: Mapping[str, str], share: Share) -> dict[str, str]:
    """Variables without which ranks on several nodes would tell each other a loopback address. Usually none.

    Raises:
        WorldError: this host's name resolves to loopback, and the interface to use instead cannot be told.
    """
    if share.nodes == 1:
        return {}
    from worldsize.runtime.network import check_own_address, is_loopback
    from worldsize.world import World

    if is_loopback(share.master_addr):
        return {}
    interface = check_own_address(
        World(
            rank=share.first_rank,
            size=share.world,
            node=share.node,
            nodes=share.nodes,
            local_size=share.nproc,
            master_addr=share.master_addr,
        ),
        base,
    )
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def error_file(folder: Path, rank: int) -> Path:
    """Where rank `rank` leaves the exception it ends with."""
    return folder / f"rank-{rank:04d}.error.json"


def commit_file(folder: Path, node: int) -> Path:
    """Where the ranks of one node report what they committed in this attempt: a line each, "<step> <path>"."""
    return folder / f"commits-{node:04d}"


def _contract(plan: Plan, share: Share, local_rank: int) -> dict[str, str]:
    rank = share.first_rank + local_rank
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": share.world,
        "LOCAL_WORLD_SIZE": share.nproc,
        "GROUP_RANK": share.node,
        "GROUP_WORLD_SIZE": share.nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": share.world,
        "ROLE_NAME": plan.role,
        "MASTER_ADDR": share.master_addr,
        "MASTER_PORT": share.master_port,
        "TORCHELASTIC_RUN_ID": share.run_id,
        "TORCHELASTIC_RESTART_COUNT": share.restarts,
        "TORCHELASTIC_MAX_RESTARTS": plan.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in values.items()}


def _ours(plan: Plan, share: Share, local_rank: int, folder: Path) -> dict[str, str]:
    rank = share.first_rank + local_rank
    log_dir = folder.parent.parent
    return {
        "TORCHELASTIC_ERROR_FILE": str(error_file(folder, rank)),
        "WORLDSIZE_LAUNCHER": "worldsize",
        "WORLDSIZE_LOG_DIR": str(log_dir),
        "WORLDSIZE_COMMIT_FILE": str(commit_file(folder, share.node)),
        "WORLDSIZE_GRACE": f"{plan.grace:g}",
    }
