"""Room: what the environment says about the world. Knows the launchers' variable names; no torch, no Slurm commands.

`detect` is a pure function of a mapping; `read` and `export` are the only places that touch this process's own
environment. The nearest launcher wins, in this order:

1. `RANK` + `WORLD_SIZE` (torchrun's contract: `worldsize run`, torchrun, accelerate, deepspeed, or set by hand),
2. horovodrun (`HOROVOD_RANK`, `HOROVOD_SIZE`; with its `--mpi` it is Open MPI),
3. Open MPI (`OMPI_COMM_WORLD_*`),
4. PMI (`PMI_RANK`, `PMI_SIZE`: MPICH, Intel MPI), unless they are only Slurm's own rank again,
5. a Slurm step of several tasks (`srun`),
6. nothing, a Slurm batch script, an interactive shell, a step of one task: one process.

Variables that a farther launcher left behind are compared with the nearer one where they speak of the same thing; a
contradiction is an error that shows both.

`WORLDSIZE_LAUNCHER` is the switch. `none`: one process, nothing is read. `local`: schedulers and MPI are not looked
at. `torchrun`, `horovodrun`, `slurm`, `openmpi`, `pmi`: that one is taken (`slurm` also for a step of one task, and without
comparing the tasks started to the tasks asked for), and it is an error if it did not start this process. `worldsize`
is what `worldsize run` sets for its children.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from zlib import crc32

from worldsize.errors import WorldError
from worldsize.runtime import hostlist
from worldsize.runtime.network import is_loopback
from worldsize.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SWITCH = "WORLDSIZE_LAUNCHER"

_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
_NODE = ("GROUP_RANK", "NODE_RANK", "CROSS_RANK")
_NODES = ("GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_STEP_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")

_HOROVOD = tuple(
    f"HOROVOD_{word}" for word in ("RANK", "SIZE", "LOCAL_SIZE", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
)

_FIRST_SHELL_STEP = 0xFFFF_FFF0
"""Slurm numbers the batch, extern and interactive steps from the top of 32 bits; `srun` counts from 0."""

_PORTS = range(15000, 30000)
"""Above the well-known ports and below every default range of ephemeral ones."""


def read() -> Mapping[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def export(values: Mapping[str, str]) -> None:
    """Set variables for the libraries and children of this process."""
    os.environ.update(values)


@contextmanager
def lent(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while a library reads them; afterwards they are as before, so that no child inherits them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def detect(environ: Mapping[str, str]) -> World:
    """The world that `environ` describes. Pure: reads nothing else.

    Raises:
        WorldError: the variables are partial or contradict each other; those that matter are shown with their values.
    """
    env = _Env(environ)
    forced = env.text(SWITCH)
    if forced is None:
        return _agreeing(env, _nearest(env))
    if forced not in _FORCED:
        raise WorldError(f"{SWITCH} is none of {', '.join(_FORCED)}", found=env.show(SWITCH))
    return _FORCED[forced](env)


def here() -> World:
    """The world that this process is in. Raises as `detect`."""
    return detect(read())


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether this process was started by srun, rather than being in a batch script or outside Slurm."""
    return _step(_Env(environ)) is not None


@dataclass(frozen=True, slots=True)
class _Env:
    """The mapping, read with care: empty is unset, a number is a whole number of at least 0."""

    environ: Mapping[str, str]

    def text(self, *names: str) -> str | None:
        """The first of `names` that is set."""
        return next((value for name in names if (value := self.environ.get(name, "").strip())), None)

    def number(self, *names: str) -> int | None:
        """The first of `names` that is set, as a number."""
        text = self.text(*names)
        if text is not None and not (text.isascii() and text.isdigit()):
            raise WorldError(f"{' or '.join(names)} is not a whole number", found=self.show(*names))
        return None if text is None else int(text)

    def need(self, names: tuple[str, ...], *beside: str) -> int:
        """Like `number`, but an error if none is set; `beside` is shown with it."""
        number = self.number(*names)
        if number is None:
            raise WorldError(
                f"{names[0]} is not set, so the world is described only in part",
                found=self.show(*beside, *names),
                do=f"set it, or {SWITCH}=none for a single process",
            )
        return number

    def show(self, *names: str) -> str:
        """Every name with its value, for an error."""
        values = ((name, self.text(name)) for name in names)
        return ", ".join(f"{name} unset" if value is None else f"{name}={value}" for name, value in values)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a launcher said; None where it said nothing."""

    rank: int
    size: int
    local_size: int
    local_rank: int | None = None
    node: int | None = None
    nodes: int | None = None


def _nearest(env: _Env) -> World:
    if env.text("RANK") is not None:
        return _contract(env)
    if env.text(_HOROVOD[0]) is not None:
        return _horovodrun(env)
    if env.text("OMPI_COMM_WORLD_RANK") is not None:
        return _openmpi(env)
    if env.text("PMI_RANK") is not None and not _slurm_speaks_pmi(env):
        return _pmi(env)
    if _step(env) is not None:
        return _slurm_task(env)
    for name in ("PMIX_RANK", "PMI_ID", "MPI_LOCALRANKID"):
        if env.text(name) is not None:
            raise WorldError(
                "an MPI launcher started this process but does not say how many there are",
                found=env.show(name, "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
                do=f"set RANK and WORLD_SIZE, or {SWITCH}=none for a single process",
            )
    return World()


def _local(env: _Env) -> World:
    return _contract(env) if env.text("RANK") is not None else _agreeing(env, World())


def _agreeing(env: _Env, world: World) -> World:
    """The world, if no variable of torchrun's contract speaks of another one."""
    checks = (
        ("WORLD_SIZE", ("WORLD_SIZE",), world.size),
        ("LOCAL_RANK", ("LOCAL_RANK",), world.local_rank),
        ("LOCAL_WORLD_SIZE", _LOCAL_SIZE, world.local_size),
    )
    for name, names, ours in checks:
        theirs = env.number(*names)
        if theirs not in (None, ours):
            raise WorldError(
                f"{name}={theirs} contradicts the launcher ({world.launcher}), which says {ours}",
                found=f"{env.show('RANK', *names)}; rank {world.rank} of {world.size} by the launcher",
                do=f"unset {name}, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or set {SWITCH}",
            )
    return world


# --- torchrun's contract


def _contract(env: _Env) -> World:
    rank, size = env.need(("RANK",), "WORLD_SIZE"), env.need(("WORLD_SIZE",), "RANK")
    _below(env, "RANK", rank, "WORLD_SIZE", size)
    launcher, local_size, local_rank = _who(env), _local_size(env, size), env.number("LOCAL_RANK")
    if local_rank is not None:
        _below(env, "LOCAL_RANK", local_rank, _LOCAL_SIZE[0], local_size)
    if env.text(SWITCH) is None and launcher == "env":
        _same_rank_as_slurm(env, rank, size)
        _same_rank_as_horovod(env, rank, size)
    world = _lay(env, _Said(rank, size, local_size, local_rank, env.number(*_NODE), env.number(*_NODES)))
    name, restart = env.text("TORCHELASTIC_RUN_ID"), env.number("TORCHELASTIC_RESTART_COUNT") or 0
    # The agents of torchrun met at this address before any rank started: loopback then means two agents on one host.
    return _reaching(env, replace(world, launcher=launcher, run_id=name, restart=restart), met=launcher != "env")


def _who(env: _Env) -> str:
    if env.text(SWITCH) == "worldsize":
        return "worldsize"
    return "env" if env.text("TORCHELASTIC_RUN_ID") is None else "torchrun"


def _same_rank_as_slurm(env: _Env, rank: int, size: int) -> None:
    """`export RANK=$SLURM_PROCID` in a batch script is 0 in every task: the step then disagrees."""
    if _step(env) is None or env.number(*_TASKS) != size or size == 1:
        return
    if env.number("SLURM_PROCID") not in (None, rank):
        raise WorldError(
            "RANK is not the rank of this Slurm task",
            found=env.show("RANK", "SLURM_PROCID", "WORLD_SIZE", "SLURM_NTASKS"),
            do=f"leave RANK unset, or set it inside the task; {SWITCH}=torchrun if it is meant",
        )


def _same_rank_as_horovod(env: _Env, rank: int, size: int) -> None:
    """Variables of torchrun's contract that horovodrun handed on are equal in all of its ranks."""
    if (env.number("HOROVOD_RANK"), env.number("HOROVOD_SIZE")) not in ((None, None), (rank, size)):
        raise WorldError(
            "RANK and WORLD_SIZE are not those of this rank of horovodrun",
            found=env.show("RANK", "HOROVOD_RANK", "WORLD_SIZE", "HOROVOD_SIZE"),
            do="unset RANK and WORLD_SIZE before horovodrun",
        )


def _local_size(env: _Env, size: int) -> int:
    given = env.number(*_LOCAL_SIZE)
    if given is not None:
        return given
    nodes, address = env.number(*_NODES), env.text("MASTER_ADDR")
    if size == 1 or nodes == 1 or (nodes is None and address is not None and is_loopback(address)):
        return size
    if nodes and size % nodes == 0:
        return size // nodes
    raise WorldError(
        "how many ranks share this node is not said",
        found=env.show("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
        do="set LOCAL_RANK and LOCAL_WORLD_SIZE",
    )


# --- horovodrun


def _horovodrun(env: _Env) -> World:
    """Where rank 0 listens is said in its key-value store (`runtime.keyvalue`), unless the user said it."""
    rank, size, local_size, local_rank, node, nodes = (env.need((name,), *_HOROVOD) for name in _HOROVOD)
    _below(env, "HOROVOD_RANK", rank, "HOROVOD_SIZE", size)
    # A node with fewer ranks than others is not counted by those that have no counterpart there.
    alike = local_size * nodes == size
    said = _Said(rank, size, local_size, local_rank, node if alike else None, nodes if alike else None)
    world = replace(_lay(env, said), launcher="horovodrun")
    if None in (env.text("MASTER_ADDR"), env.text("MASTER_PORT")) and not world.alone:
        env.need(("HOROVOD_GLOO_RENDEZVOUS_PORT",), "HOROVOD_GLOO_RENDEZVOUS_ADDR")
        return world
    return _reaching(env, world)


# --- MPI


def _openmpi(env: _Env) -> World:
    names = [f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_SIZE", "LOCAL_RANK")]
    rank, size, local_size, local_rank = (env.need((name,), *names) for name in names)
    _below(env, names[0], rank, names[1], size)
    world = _lay(env, _Said(rank, size, local_size, local_rank))
    name = env.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _reaching(env, replace(world, launcher="openmpi", run_id=name), port=_port_of(name))


def _pmi(env: _Env) -> World:
    rank, size = env.need(("PMI_RANK",), "PMI_SIZE"), env.need(("PMI_SIZE",), "PMI_RANK")
    _below(env, "PMI_RANK", rank, "PMI_SIZE", size)
    local_size = 1 if size == 1 else env.need(("MPI_LOCALNRANKS",), "PMI_SIZE")
    local_rank = 0 if size == 1 else env.need(("MPI_LOCALRANKID",), "PMI_RANK")
    said, first = _Said(rank, size, local_size, local_rank), None
    if local_size < size and _started_by_slurm_proxies(env):
        # Hydra deals ranks over nodes in turn; its proxies are Slurm tasks, one a node, in the same order.
        nodes = env.need(_STEP_NODES, *_STEP)
        said, first = replace(said, node=env.need(("SLURM_NODEID",), *_STEP), nodes=nodes), _first_node(env, nodes)
    name = env.text("PMI_JOBID", *_JOB)
    return _reaching(env, replace(_lay(env, said), launcher="pmi", run_id=name), first, _port_of(name))


def _port_of(name: str | None) -> int | None:
    return None if name is None else _PORTS[crc32(name.encode()) % len(_PORTS)]


def _slurm_speaks_pmi(env: _Env) -> bool:
    """Whether PMI_* is only srun's own numbering again (`srun --mpi=pmi2`)."""
    ours = (env.number("PMI_RANK"), env.number("PMI_SIZE"))
    return _step(env) is not None and ours == (env.number("SLURM_PROCID"), env.number(*_TASKS))


def _started_by_slurm_proxies(env: _Env) -> bool:
    text = env.text(*_TASKS_PER_NODE)
    return _step(env) is not None and text is not None and set(hostlist.counts(text)) == {1}


# --- Slurm


def _step(env: _Env) -> int | None:
    """The number of the srun step this process is in; None in batch scripts, salloc shells and outside Slurm."""
    text = env.text(*_STEP)
    if text is None or not text.isdigit() or int(text) >= _FIRST_SHELL_STEP:
        return None
    return int(text)


def _slurm_task(env: _Env) -> World:
    tasks = _tasks(env)
    if env.text("SLURM_PTY_PORT", "SLURM_PTY_WIN_COL") is not None:
        if tasks == 1:
            return World()
        raise WorldError(
            "this is an interactive Slurm step of several tasks: a shell on one of them, or all of them",
            found=env.show("SLURM_PTY_PORT", "SLURM_PROCID", "SLURM_NTASKS"),
            do=f"start srun without --pty, or set {SWITCH} to slurm or none",
        )
    world = _slurm(env)
    _as_many_as_asked(env, tasks)
    return world if tasks > 1 else World(run_id=world.run_id, restart=world.restart)


def _forced_slurm(env: _Env) -> World:
    if _step(env) is None:
        raise WorldError(
            f"{SWITCH}=slurm, but this process is no task of a Slurm step",
            found=env.show(*_JOB[:1], *_STEP[:1], "SLURM_PROCID"),
            do=f"start it with srun, or unset {SWITCH}",
        )
    return _slurm(env)


def _slurm(env: _Env) -> World:
    rank, size = env.need(("SLURM_PROCID",), *_STEP[:1]), _tasks(env)
    _below(env, "SLURM_PROCID", rank, _TASKS[1], size)
    world = _lay(env, _slurm_place(env, rank, size))
    job, restart = env.need(_JOB, *_STEP[:1]), env.number("SLURM_RESTART_COUNT") or 0
    # Neighbouring job ids must not meet on one port, so no hash: 37 has no factor in common with the range.
    port = _PORTS[(job * 37 + (_step(env) or 0) * 5 + restart) % len(_PORTS)]
    first = None if env.text("MASTER_ADDR") else _first_node(env, world.nodes)
    return _reaching(env, replace(world, launcher="slurm", run_id=str(job), restart=restart), first, port)


def _tasks(env: _Env) -> int:
    step, job = (env.number(name) for name in _TASKS)
    if step is not None and job is not None and step != job:
        raise WorldError("Slurm's two counts of tasks differ", found=env.show(*_TASKS), do=f"unset {_TASKS[1]}")
    return env.need(_TASKS, *_STEP[:1])


def _slurm_place(env: _Env, rank: int, size: int) -> _Said:
    node, local_rank = env.need(("SLURM_NODEID",), *_STEP[:1]), env.need(("SLURM_LOCALID",), *_STEP[:1])
    nodes, text = env.need(_STEP_NODES, *_STEP[:1]), env.text(*_TASKS_PER_NODE)
    per_node = [size] if text is None and nodes == 1 else hostlist.counts(text or "")
    if sum(per_node) != size or len(per_node) != nodes:
        raise WorldError(
            "tasks per node do not add up to the tasks and nodes of this Slurm step",
            found=env.show(*_TASKS_PER_NODE, *_TASKS, *_STEP_NODES),
        )
    _below(env, "SLURM_NODEID", node, "SLURM_NNODES", nodes)
    if local_rank >= per_node[node]:
        raise WorldError(
            f"SLURM_LOCALID={local_rank} on a node of {per_node[node]} tasks",
            found=env.show("SLURM_LOCALID", "SLURM_NODEID", *_TASKS_PER_NODE),
        )
    return _Said(rank, size, per_node[node], local_rank, node, nodes)


def _first_node(env: _Env, nodes: int) -> str | None:
    text = env.text(*_NODELIST)
    if nodes == 1:
        return None
    if text is None:
        raise WorldError(
            f"{nodes} nodes, but no list of their names",
            found=env.show(*_NODELIST[:1], _NODELIST[-1], *_STEP_NODES),
            do="set MASTER_ADDR to the first node's name",
        )
    names = hostlist.expand(text)
    if len(names) != nodes:
        raise WorldError(f"{len(names)} node names for {nodes} nodes", found=env.show(*_NODELIST, *_STEP_NODES))
    return names[0]


def _as_many_as_asked(env: _Env, tasks: int) -> None:
    """With -n, --ntasks-per-node is an upper bound; but no node reaching it means that tasks were not started."""
    asked, text = env.number("SLURM_NTASKS_PER_NODE"), env.text(*_TASKS_PER_NODE)
    most = tasks if text is None else max(hostlist.counts(text))
    if asked is not None and most < asked:
        raise WorldError(
            f"{asked} tasks per node were asked for, but Slurm started at most {most} on a node",
            found=env.show("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", *_STEP_NODES),
            do=f"start with srun --ntasks-per-node={asked}, or set {SWITCH}=slurm if fewer are meant",
        )


# --- common


def _below(env: _Env, index_name: str, index: int, count_name: str, count: int) -> None:
    if index >= count:
        raise WorldError(
            f"{index_name} must be below {count_name}, which is {count}",
            found=env.show(index_name, count_name),
            do=f"ranks count from 0 to {count_name} - 1",
        )


def _lay(env: _Env, said: _Said) -> World:
    """The place on the nodes. What was not said follows from equal nodes with consecutive ranks, or it is an error.

    Where the nodes are not like that, at least one rank fails here or counts another number of nodes than the rest.
    """
    full = said
    if None in (said.local_rank, said.node, said.nodes):
        if not said.local_size or said.size % said.local_size:
            raise _no_place(env, said)
        node, local_rank = divmod(said.rank, said.local_size)
        full = replace(said, local_rank=local_rank, node=node, nodes=said.size // said.local_size)
    agrees = all(getattr(said, name) in (None, getattr(full, name)) for name in ("local_rank", "node", "nodes"))
    local_rank, node, nodes = full.local_rank or 0, full.node or 0, full.nodes or 0
    inside = local_rank < full.local_size and node < nodes
    fits = full.local_size == full.size if nodes == 1 else full.local_size + nodes - 1 <= full.size
    if not (agrees and inside and fits):
        raise _no_place(env, said)
    return World(full.rank, full.size, local_rank, full.local_size, node, nodes)


def _no_place(env: _Env, said: _Said) -> WorldError:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    numbers = (said.rank, said.size, said.local_rank, said.local_size, said.node, said.nodes)
    words = ("rank", "size", "local rank", "local size", "node", "nodes")
    seen = [f"{word} {'unset' if value is None else value}" for word, value in zip(words, numbers, strict=True)]
    return WorldError(
        "these ranks do not fit on these nodes, or lie on them in an order that cannot be derived",
        found=f"{', '.join(seen)}; {env.show(*names)}",
        do="set LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (this node) and GROUP_WORLD_SIZE (nodes) for every rank",
    )


def _reaching(
    env: _Env, world: World, first: str | None = None, port: int | None = None, *, met: bool = False
) -> World:
    """With where rank 0 listens: what the user set, else the first node (on one node: loopback) and `port`."""
    if world.alone:
        return replace(world, master_addr=env.text("MASTER_ADDR"), master_port=env.number("MASTER_PORT"))
    address = env.text("MASTER_ADDR") or (first if world.nodes > 1 else "127.0.0.1")
    port = env.number("MASTER_PORT") or port
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise WorldError(
            f"{missing} is not set, and this launcher ({world.launcher}) does not give one to all ranks",
            found=env.show("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
            do=f"set {missing} for every rank (mpirun -x {missing}=..., mpiexec -genv {missing} ...)",
        )
    if world.nodes > 1 and not met and is_loopback(address):
        raise WorldError(
            f"MASTER_ADDR is a loopback address, but there are {world.nodes} nodes: each would wait for itself",
            found=f"MASTER_ADDR={address}, nodes={world.nodes}",
            do="set MASTER_ADDR to a name or address of the first node that the others can reach",
        )
    if not 0 < port < 1 << 16:
        raise WorldError("MASTER_PORT is not a port", found=env.show("MASTER_PORT"), do="choose one of 1024-65535")
    return replace(world, master_addr=address.strip("[]"), master_port=port)


_FORCED: dict[str, Callable[[_Env], World]] = {
    "none": lambda _: World(),
    "local": _local,
    "worldsize": _contract,
    "torchrun": _contract,
    "horovodrun": _horovodrun,
    "slurm": _forced_slurm,
    "openmpi": _openmpi,
    "pmi": _pmi,
}
