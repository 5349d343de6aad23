"""Room: one task of a Slurm step, on its node: meets the others, then becomes what this way of starting executes here.

Everything that differs between nodes is found out here and not in the batch script, which knows the first node only.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from worldsize.errors import LaunchError, NotStartedError
from worldsize.launch import env, ports, program, shell, threads
from worldsize.launch.slurm import arrival, facts, meet
from worldsize.launch.slurm.arrival import Asked
from worldsize.launch.slurm.ways import HEARS_STOPS, ONE_TASK, TASK_A_RANK, Place, Work, command
from worldsize.runtime import network, visible
from worldsize.runtime.env import detect
from worldsize.runtime.hostlist import expand

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        asked: what is done on each node before.
    """

    way: str
    work: Work
    nproc: str
    meet: Path
    suffix: str = ""
    interface: str | None = None
    limit: float = 600.0
    asked: Asked = field(default_factory=Asked)


def become(task: Task) -> NoReturn:
    """Meet the other tasks, then execute this one's command in place of this process.

    Where copies lie on this node, this process stays until the command has ended, and removes them.

    Raises:
        ConfigError: the environment is not the one at submit, and that was to be refused.
        LaunchError: the first node cannot be found, or reached only through loopback from another host; or something
            cannot be copied.
        WorldError: this is no task of a complete Slurm step.
        NotStartedError: the command is not there.
    """
    environ = {name: value for name, value in env.read().items() if name not in _SET_BY_US}
    world = detect(environ)
    for line in arrival.look(task.asked, world, environ):
        sys.stderr.write(f"worldsize: {line}\n")
    stage = arrival.staged(task.asked, world, environ, task.meet / _run_id(environ))
    try:
        if stage is not None:
            environ |= stage.variables(environ)
            task = replace(task, work=arrival.placed(task.work, stage, venv=task.asked.venv is not None))
        argv, values = prepared(task, environ)
        if task.way not in HEARS_STOPS:
            # Its agent would die of it and leave the ranks alone. Ranks of ours hear it all the same: they ask to.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if stage is None:
            _execute(argv, values)
        code = shell.attend(argv, values)
    finally:
        if stage is not None:
            stage.leave()
    sys.exit(code)


def _execute(argv: tuple[str, ...], values: Mapping[str, str]) -> NoReturn:
    try:
        os.execvpe(argv[0], argv, values)  # noqa: S606 - this process is that command from now on
    except OSError as error:
        raise NotStartedError(f"{argv[0]} cannot be started", found=str(error)) from error


def _run_id(environ: Mapping[str, str]) -> str:
    return "-".join((environ["SLURM_JOB_ID"], environ.get("SLURM_RESTART_COUNT", "0"), environ["SLURM_STEP_ID"]))


def prepared(task: Task, environ: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The argv of this task and its environment."""
    world = detect(environ)
    spot = _meeting(task, world, environ, task.meet / _run_id(environ))
    place = _place(task, world, environ, spot)
    values = env.without_ranks(environ) | arrival.variables(task.asked)
    allowed, one = len(os.sched_getaffinity(0)), task.way == TASK_A_RANK
    values |= threads.share({**environ, **values}, allowed, tasks=world.local_size, ranks=1 if one else place.nproc)
    # So that a template finds torchrun and accelerate beside the interpreter, where no environment is activated.
    values["PATH"] = os.pathsep.join((values.get("PATH") or os.defpath, str(Path(sys.executable).parent)))
    if one:
        values |= _contract(world, place)
    return command(task.way, task.work, place), values


def _place(task: Task, world: World, environ: Mapping[str, str], spot: meet.Spot) -> Place:
    hosts = tuple(expand(environ.get("SLURM_JOB_NODELIST", ""))) if task.way == ONE_TASK else ()
    if task.way == TASK_A_RANK:
        sizes = (world.local_size,) * world.nodes
    else:
        counts = [program.ranks(word, environ, None) for word in task.nproc.split(",")]
        sizes = tuple(counts) if len(counts) > 1 else (counts[0],) * (len(hosts) or world.nodes)
    devices = tuple(visible.entries(environ.get(visible.VISIBLE)) or ())
    return Place(world.node, sizes, spot.address, spot.port, _run_id(environ), devices, hosts)


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
