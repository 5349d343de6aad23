"""Room: one task of a Slurm step, on its node: meets the others, then becomes what this way of starting executes here.

Everything that differs between nodes is found out here and not in the batch script, which knows the first node only.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from worldsize.errors import LaunchError, NotStartedError
from worldsize.launch import env, ports, program
from worldsize.launch.slurm import facts, meet
from worldsize.launch.slurm.ways import TASK_A_RANK, Place, Work, command
from worldsize.runtime import network
from worldsize.runtime.env import detect

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from worldsize.world import World

_ONE_HOST = "127.0.0.1"
_SET_BY_US = ("MASTER_ADDR", "MASTER_PORT")
_kept: list[socket.socket] = []


@dataclass(frozen=True, slots=True)
class Task:
    """What every task of the step is told alike.

    Attributes:
        way: how ranks are started, see `ways`.
        work: what is started.
        nproc: ranks on a node: a number, "auto", "gpu" or "cpu"; not for `srun`, where Slurm counts.
        meet: the folder, shared by all nodes, in which the first task writes where it listens.
        suffix: added to the first node's name for the network between nodes.
        interface: whose address the first node gives instead.
        limit: seconds to wait for the first node.
    """

    way: str
    work: Work
    nproc: str
    meet: Path
    suffix: str = ""
    interface: str | None = None
    limit: float = 600.0


def become(task: Task) -> NoReturn:
    """Meet the other tasks, then execute this one's command in place of this process.

    Raises:
        LaunchError: the first node cannot be found, or reached only through loopback from another host.
        WorldError: this is no task of a complete Slurm step.
        NotStartedError: the command is not there.
    """
    environ = {name: value for name, value in env.read().items() if name not in _SET_BY_US}
    argv, values = prepared(task, environ)
    try:
        os.execvpe(argv[0], argv, values)  # noqa: S606 - this process is that command from now on
    except OSError as error:
        raise NotStartedError(f"{argv[0]} cannot be started", found=str(error)) from error


def prepared(task: Task, environ: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The argv of this task and its environment."""
    world = detect(environ)
    run_id = "-".join((environ["SLURM_JOB_ID"], environ.get("SLURM_RESTART_COUNT", "0"), environ["SLURM_STEP_ID"]))
    spot = _meeting(task, world, environ, task.meet / run_id)
    each = world.local_size if task.way == TASK_A_RANK else program.ranks(task.nproc, environ, None)
    size = world.size if task.way == TASK_A_RANK else each * world.nodes
    place = Place(world.node, world.nodes, each, size, spot.address, spot.port, run_id)
    values = env.without_ranks(environ)
    if task.way == TASK_A_RANK:
        values |= _contract(world, place)
    return command(task.way, task.work, place), values


def _meeting(task: Task, world: World, environ: Mapping[str, str], path: Path) -> meet.Spot:
    host = socket.gethostname()
    if world.rank == 0:
        # Bound, not listened on, and inherited by the command: it is kept for the one who will listen.
        port = ports.reserve()
        port.set_inheritable(True)
        spot = meet.Spot(_address(task, environ), port.getsockname()[1], host)
        _kept.append(port)
        facts.put(path, spot)
        return spot
    first = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "the first node")
    spot = meet.wait(path, task.limit, who=f"the first of {first}")
    if network.is_loopback(spot.address) and spot.host != host:
        raise LaunchError(
            f"the first node gave {spot.address}, which is loopback, as its address",
            found=f"{spot.host}, asked by {host}",
            do="set interface or address_suffix in the site profile, or mend /etc/hosts there",
        )
    return spot


def _address(task: Task, environ: Mapping[str, str]) -> str:
    """This node's name or address, as the others are to reach it."""
    names = [environ.get("SLURMD_NODENAME") or socket.gethostname(), socket.gethostname()]
    if task.suffix:
        return names[0] + task.suffix
    if task.interface:
        return network.address_of(task.interface)
    for name in names:
        own = network.addresses(name)
        if own and not any(map(network.is_loopback, own)):
            return name
    return network.outward_address() or _ONE_HOST


def _contract(world: World, place: Place) -> dict[str, str]:
    """Torchrun's variables for a rank that Slurm started."""
    values = {
        "RANK": world.rank,
        "LOCAL_RANK": world.local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node,
        "GROUP_WORLD_SIZE": world.nodes,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
        "TORCHELASTIC_RUN_ID": place.run_id,
    }
    return {name: str(value) for name, value in values.items()}
