"""Room: the agents are started by the launchers that there are: srun over all nodes, ssh by `worldsize run`, or here."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.shell import Group
from worldsize.runtime.env import in_slurm_step
from worldsize.tools.doctor.wire import ADDRESS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from worldsize.launch.shell import Child
    from worldsize.tools.doctor.wire import Door

AGENT = ("-m", "worldsize.tools.doctor.agent")
_KEPT = 1 << 14
_LEAVE_S, _POLL_S = 10.0, 0.05
_AT_MOST = "--time=15"
"""Minutes of an allocation of our own, unless options of srun say another time: it ends even if we are killed."""


@dataclass(frozen=True, slots=True)
class Way:
    """How agents are started.

    Attributes:
        python: the command that is Python on the hosts.
        hosts: for ssh: as it knows them.
        ssh: options of `worldsize run` that say how they are reached.
        nodes: for srun: how many; None: no srun.
        srun: further options of srun.
        names: the nodes that srun will take, where they are known.
        inside: srun starts a step of the job that this process is in.
    """

    python: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    nodes: int | None = None
    srun: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    inside: bool = False

    @property
    def count(self) -> int:
        """How many hosts."""
        return self.nodes or len(self.hosts) or 1

    @property
    def here(self) -> bool:
        """This host alone."""
        return not self.hosts and self.nodes is None

    def commands(self) -> dict[str, tuple[str, ...]]:
        """What is started here, by the host that it is for; "" where it is for all."""
        if self.hosts:
            return {host: self._over_ssh(host) for host in self.hosts}
        if self.nodes is None:
            return {"": (*self.python, *AGENT)}
        joined = ("--overlap",) if self.inside else (_AT_MOST,)
        tasks = (f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1")
        # One that fails, or cannot be reached, must not end the others.
        calm = ("--kill-on-bad-exit=0", "--no-kill", "--export=ALL", "--input=none", "--mpi=none", "--quiet")
        return {"": ("srun", *joined, *tasks, *calm, *self.srun, *self.python, *AGENT)}

    def _over_ssh(self, host: str) -> tuple[str, ...]:
        """A start of its own for each: nothing of them has to meet, and one that fails says why."""
        alone = ("run", "--hosts", host, "--nproc-per-node", "1", *self.ssh)
        return (*self.python, "-m", "worldsize", *alone, *AGENT, host)


def inside(environ: Mapping[str, str]) -> int | None:
    """The nodes of the job that this process is in; None: it is in none.

    Raises:
        ConfigError: it is one of several tasks, each of which would look at all nodes.
    """
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    if not environ.get("SLURM_JOB_ID") or not nodes:
        return None
    if in_slurm_step(environ) and environ.get("SLURM_NTASKS", "1") != "1":
        raise ConfigError(
            "doctor was started by srun, once on each task",
            found=f"SLURM_NTASKS={environ['SLURM_NTASKS']}",
            do="call it once, in the batch script: it starts its own step on all nodes",
        )
    return int(nodes)


@dataclass(slots=True)
class Started:
    """The commands while they run, and the end of what each has printed."""

    group: Group = field(default_factory=Group)
    children: dict[str, Child] = field(default_factory=dict)
    said: dict[str, bytes] = field(default_factory=dict)

    def start(self, way: Way, door: Door, environ: Mapping[str, str]) -> None:
        """Start them. Raises NotStartedError where there is no such command."""
        for host, argv in way.commands().items():
            self.children[host] = self.group.start(argv, {**environ, ADDRESS: door.text})

    def expected(self, count: int, here: Collection[str]) -> int:
        """How many of so many hosts have come or still can. Reads what is printed, so that nobody waits for that."""
        for host, child in self.children.items():
            for pipe in (child.stdout, child.stderr):
                self.said[host] = (self.said.get(host, b"") + _read(pipe))[-_KEPT:]
        running = [host for host, child in self.children.items() if child.code is None]
        return count if "" in running else len({*running, *here})

    def why(self, host: str) -> str:
        """What was said about a host, or for all: the last line that is ours, or the last one."""
        text = self.said.get(host, self.said.get("", b"")).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith(("worldsize:", "srun: error"))]
        return (own or lines or ["it said nothing"])[-1].removeprefix("worldsize: ")

    def _left(self, limit: float) -> bool:
        end = time.monotonic() + limit
        while (running := self.expected(1, ())) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return not running

    def close(self) -> None:
        """Wait for their end, which comes with that of the agents: srun gives its nodes back then. What stays is ended."""
        if not self._left(_LEAVE_S):
            for child in self.children.values():
                child.send(signal.SIGTERM)
            self._left(_LEAVE_S)
        self.group.close()
        for child in self.children.values():
            child.close()


def _read(pipe: int) -> bytes:
    data = b""
    try:
        while more := os.read(pipe, 1 << 16):
            data += more
    except BlockingIOError:
        pass
    return data
