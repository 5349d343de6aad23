"""Room: the ways in which the ranks of a Slurm job are started: what one task of the step executes. Pure, no torch.

`srun` starts one task a rank; `horovodrun` one task in all, which reaches the other nodes by ssh; every other way one task
a node, which starts that node's ranks.
"""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.template import PLACES, fill

if TYPE_CHECKING:
    from collections.abc import Callable

TASK_A_RANK = "srun"
ONE_TASK = "horovodrun"
HEARS_STOPS = ("worldsize", TASK_A_RANK)
"""Where the process that srun starts knows what SIGUSR1 asks for: our supervisor, or the rank itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a task knows once the nodes have met.

    Attributes:
        node: this node's number; nodes: how many there are.
        sizes: ranks on each node.
        address: where the first node is reached; port: one that is free there and kept for this job.
        run_id: the name of this attempt, equal on all nodes.
        devices: the GPUs that Slurm gave this node's task, as CUDA_VISIBLE_DEVICES names them; empty: all, or none.
        hosts: the names of the job's nodes.
    """

    node: int
    sizes: tuple[int, ...]
    address: str
    port: int
    run_id: str
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.sizes)

    @property
    def nproc(self) -> int:
        """Ranks on this node."""
        return self.sizes[self.node]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return sum(self.sizes)

    @property
    def endpoint(self) -> str:
        """Address and port in one word."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Work:
    """What is started, the same on every node.

    Attributes:
        program: argv of the training: a script, or "-m" and a module, and its arguments.
        python: the interpreter of the node.
        log_dir: where the supervisor keeps the ranks' logs.
        max_restarts: how often ranks are started again inside one attempt of the job.
        grace: seconds from a stop signal to SIGKILL.
        template: a command line with `PLACES`.
    """

    program: tuple[str, ...]
    python: str
    log_dir: str | None = None
    max_restarts: int = 0
    grace: int = 120
    template: str | None = None


def command(way: str, work: Work, place: Place) -> tuple[str, ...]:
    """The argv of this node's task (of this rank's, for `srun`).

    Raises:
        ConfigError: there is no such way, or its template names what there is not.
    """
    if way not in _WAYS:
        raise ConfigError(f"launcher {way!r} is not known", do=f"choose one of {', '.join(_WAYS)}")
    return _WAYS[way](work, place)


def _srun(work: Work, _: Place) -> tuple[str, ...]:
    return (work.python, "-u", *work.program)


def _supervisor(work: Work, place: Place) -> tuple[str, ...]:
    several = (
        "--nnodes",
        str(place.nodes),
        "--node-rank",
        str(place.node),
        "--rdzv-endpoint",
        place.endpoint,
        "--one-console",
    )
    options = ("--nproc-per-node", str(place.nproc), *(several if place.nodes > 1 else ()), "--rdzv-id", place.run_id)
    logs = ("--log-dir", work.log_dir) if work.log_dir else ()
    limits = ("--max-restarts", str(work.max_restarts), "--grace", f"{work.grace}s")
    module, words = (("-m",), work.program[1:]) if work.program[0] == "-m" else ((), work.program)
    return (work.python, "-m", "worldsize", "run", *options, *logs, *limits, *module, "--", *words)


def _torchrun(work: Work, place: Place) -> tuple[str, ...]:
    meeting = (
        ("--master-addr", place.address, "--master-port", str(place.port)) if place.nodes > 1 else ("--standalone",)
    )
    nodes = ("--nnodes", str(place.nodes), "--node-rank", str(place.node)) if place.nodes > 1 else ()
    ranks = ("--nproc-per-node", str(place.nproc), "--max-restarts", str(work.max_restarts))
    logs = ("--log-dir", work.log_dir) if work.log_dir else ()
    return (work.python, "-m", "torch.distributed.run", *nodes, *meeting, *ranks, *logs, *work.program)


def _accelerate(work: Work, place: Place) -> tuple[str, ...]:
    if work.template:
        return _template(work, place)
    numbers = (
        "--num_processes",
        str(place.world),
        "--num_machines",
        str(place.nodes),
        "--machine_rank",
        str(place.node),
    )
    several = ("--multi_gpu",) if place.world > 1 else ()
    meeting = ("--main_process_ip", place.address, "--main_process_port", str(place.port))
    module, words = (("--module",), work.program[1:]) if work.program[0] == "-m" else ((), work.program)
    return (work.python, "-m", "accelerate.commands.launch", *several, *numbers, *meeting, *module, *words)


def _deepspeed(work: Work, place: Place) -> tuple[str, ...]:
    """What DeepSpeed's own runner starts on each node, once it has got there."""
    slots = {f"node{at}": list(range(size)) for at, size in enumerate(place.sizes)}
    own: list[str] | list[int] = list(place.devices[: place.nproc]) or slots[f"node{place.node}"]
    world = base64.urlsafe_b64encode(json.dumps(slots | {f"node{place.node}": own}).encode()).decode()
    meeting = (f"--master_addr={place.address}", f"--master_port={place.port}", f"--node_rank={place.node}")
    module, words = (("--module",), work.program[1:]) if work.program[0] == "-m" else ((), work.program)
    start = (work.python, "-u", "-m", "deepspeed.launcher.launch")
    # Without its --local_rank the program gets exactly its own words; LOCAL_RANK says the same.
    return (*start, f"--world_info={world}", *meeting, "--no_local_rank", *module, *words)


def _horovodrun(work: Work, place: Place) -> tuple[str, ...]:
    hosts = ",".join(f"{host}:{size}" for host, size in zip(place.hosts, place.sizes, strict=True))
    start = (work.python, "-m", "horovod.runner.launch")  # horovodrun of this interpreter, on the PATH or not
    return (*start, "-np", str(place.world), "-H", hosts, work.python, "-u", *work.program)


def _template(work: Work, place: Place) -> tuple[str, ...]:
    if not work.template:
        raise ConfigError("launcher 'template' needs a command", do=f"give command: with {{{'}, {'.join(PLACES)}}}")
    values = dict(zip(PLACES, (place.world, place.nodes, place.node, place.address, place.port), strict=True))
    return (*(fill(word, values) for word in shlex.split(work.template)), *work.program)


_WAYS: dict[str, Callable[[Work, Place], tuple[str, ...]]] = {
    "worldsize": _supervisor,
    TASK_A_RANK: _srun,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    ONE_TASK: _horovodrun,
    "template": _template,
}
WAYS = tuple(_WAYS)
