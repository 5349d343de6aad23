"""Room: the ways in which the ranks of a Slurm job are started: what one task of the step executes. Pure, no torch.

`srun` starts one task a rank; every other way starts one task a node, which starts that node's ranks.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TASK_A_RANK = "srun"
PLACES = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""What a template may name, each in braces."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a task knows once the nodes have met.

    Attributes:
        node: this node's number; nodes: how many there are.
        nproc: ranks on this node; world: ranks in all.
        address: where the first node is reached; port: one that is free there and kept for this job.
        run_id: the name of this attempt, equal on all nodes.
    """

    node: int
    nodes: int
    nproc: int
    world: int
    address: str
    port: int
    run_id: str

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
    return (work.python, "-m", "torch.distributed.run", *nodes, *meeting, *ranks, *work.program)


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
    meeting = ("--main_process_ip", place.address, "--main_process_port", str(place.port))
    module, words = (("--module",), work.program[1:]) if work.program[0] == "-m" else ((), work.program)
    return (work.python, "-m", "accelerate.commands.launch", *numbers, *meeting, *module, *words)


def _template(work: Work, place: Place) -> tuple[str, ...]:
    if not work.template:
        raise ConfigError("launcher 'template' needs a command", do=f"give command: with {{{'}, {'.join(PLACES)}}}")
    values = dict(zip(PLACES, (place.world, place.nodes, place.node, place.address, place.port), strict=True))
    return (*(_filled(word, values) for word in shlex.split(work.template)), *work.program)


def _filled(word: str, values: Mapping[str, object]) -> str:
    """Only known places are filled: other braces are the command's own."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", str(value))
    return word


_WAYS: dict[str, Callable[[Work, Place], tuple[str, ...]]] = {
    "worldsize": _supervisor,
    TASK_A_RANK: _srun,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "template": _template,
}
WAYS = tuple(_WAYS)
