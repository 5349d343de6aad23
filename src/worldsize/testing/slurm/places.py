"""Room: where a cluster's daemons run: each on a machine of its own, or all on this one. The same verbs for both."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from worldsize.errors import ConfigError
from worldsize.launch import ports, shell
from worldsize.testing.slurm import needs, nodes
from worldsize.testing.slurm.config import CONTROLLER, Host
from worldsize.testing.slurm.daemons import identify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from worldsize.testing.slurm.config import Site
    from worldsize.testing.slurm.daemons import Daemons, Record


class Places(Protocol):
    """Where things run, and what can happen there."""

    def spread(self, count: int) -> tuple[Host, tuple[Host, ...], str | None]:
        """Choose addresses: the controller's, the nodes', and their network where they have one."""

    def boot(self, site: Site, names: Sequence[str]) -> None:
        """Bring machines up, once the configuration is written."""

    def daemon(self, machine: str, name: str, argv: Sequence[str]) -> None:
        """Start a daemon, in its foreground form, that runs until the machine goes."""

    def command(self, machine: str, argv: Sequence[str], cwd: Path | str) -> tuple[str, ...]:
        """What runs `argv` on a machine."""

    def alive(self, machine: str) -> bool:
        """Whether it is on."""

    def kill(self, machine: str) -> None:
        """Power off."""

    def link(self, machine: str, state: str) -> None:
        """Take the machine's cable out ("down") or put it back ("up")."""

    def vanish(self, subnet: str | None) -> None:
        """End everything."""


class Apart:
    """Every machine in namespaces of its own. See `nodes`."""

    def __init__(self, folder: Path, daemons: Daemons, env: Mapping[str, str]) -> None:
        self._folder, self._daemons, self._env = folder, daemons, env

    def spread(self, count: int) -> tuple[Host, tuple[Host, ...], str | None]:
        """The ports are Slurm's own, as every machine has all ports."""
        switch = nodes.boot((nodes.SWITCH,), self._folder, self._daemons, self._env)[nodes.SWITCH]
        subnet = nodes.open_switch(switch, self._env)
        names = [f"node{number}" for number in range(1, count + 1)]
        hosts = tuple(Host(name, name, f"{subnet}.{number}", 6818) for number, name in enumerate(names, start=1))
        return Host(CONTROLLER, CONTROLLER, f"{subnet}.253", 6817), hosts, subnet

    def boot(self, site: Site, names: Sequence[str]) -> None:
        """Each gets its cable."""
        switch, addresses = (
            self._running(nodes.SWITCH),
            {host.name: host.address for host in (site.controller, *site.nodes)},
        )
        for name, machine in nodes.boot(names, self._folder, self._daemons, self._env).items():
            nodes.plug(switch, machine, addresses[name], self._env)

    def daemon(self, machine: str, name: str, argv: Sequence[str]) -> None:
        """It ends with the machine, so no record is needed."""
        log = self._daemons.log(f"{machine}.{name}")
        shell.call(self.command(machine, nodes.in_background(argv, log), "/"), self._env)

    def command(self, machine: str, argv: Sequence[str], cwd: Path | str) -> tuple[str, ...]:
        """Inside its namespaces."""
        return nodes.inside(self._running(machine), argv, cwd)

    def alive(self, machine: str) -> bool:
        """Its first process decides."""
        record = self._daemons.find(machine)
        return record is not None and record.alive

    def kill(self, machine: str) -> None:
        """All of it at once, as a power cut would."""
        self._daemons.stop([self._running(machine)])

    def link(self, machine: str, state: str) -> None:
        """On the side of the switch: the machine itself still believes in its address."""
        nodes.set_link(self._running(nodes.SWITCH), machine, state, self._env)

    def vanish(self, subnet: str | None) -> None:
        """The machines take everything with them."""
        self._daemons.stop(self._daemons.running().values())
        if subnet is not None:
            nodes.drop_link(subnet, self._env)

    def _running(self, name: str) -> Record:
        record = self._daemons.find(name)
        if record is None or not record.alive:
            raise ConfigError(f"{name} is not running", do=f"start it first: start-node {name}")
        return record


class Here:
    """All daemons side by side on this machine's loopback: needs no rights, and isolates nothing."""

    def __init__(self, folder: Path, daemons: Daemons, env: Mapping[str, str]) -> None:
        self._folder, self._daemons, self._env = folder, daemons, env

    def spread(self, count: int) -> tuple[Host, tuple[Host, ...], str | None]:
        """Ports that are free now."""
        name, address = socket.gethostname().partition(".")[0], needs.own_address() or "127.0.0.1"
        free = free_ports(count + 1)
        hosts = tuple(Host(f"node{index}", name, address, free[index]) for index in range(1, count + 1))
        return Host(CONTROLLER, name, address, free[0]), hosts, None

    def boot(self, site: Site, names: Sequence[str]) -> None:
        """There is nothing to bring up."""

    def daemon(self, machine: str, name: str, argv: Sequence[str]) -> None:
        """Recorded by the names of both."""
        self._daemons.start(f"{machine}.{name}", argv, self._env)

    def command(self, machine: str, argv: Sequence[str], cwd: Path | str) -> tuple[str, ...]:
        """As it is."""
        del machine
        return nodes.there(argv, cwd)

    def alive(self, machine: str) -> bool:
        """Any of its daemons will do."""
        return bool(self._of(machine))

    def kill(self, machine: str) -> None:
        """Its daemons, and the steps that run for it."""
        self._daemons.stop(self._of(machine))
        self._daemons.stop(_steps(self._folder / "spool" / machine))

    def link(self, machine: str, state: str) -> None:
        """Nobody can."""
        raise ConfigError(
            f"the link of {machine} cannot be set {state}: all nodes share this machine's loopback",
            do="start the cluster as root and without --loopback",
        )

    def vanish(self, subnet: str | None) -> None:
        """Steps too: they do not end with their slurmd."""
        del subnet
        self._daemons.stop(self._daemons.running().values())
        self._daemons.stop(_steps(self._folder / "spool"))

    def _of(self, machine: str) -> list[Record]:
        return [record for name, record in self._daemons.running().items() if name.startswith(f"{machine}.")]


def free_ports(count: int) -> list[int]:
    """Different ports that nobody had a moment ago."""
    held = [ports.reserve() for _ in range(count)]
    found = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return found


def _steps(spool: Path) -> list[Record]:
    """Every slurmstepd, known by its socket in this folder, and what it started."""
    import psutil

    sockets = psutil.net_connections("unix")
    pids = []
    for pid in {one.pid for one in sockets if one.pid and str(one.laddr).startswith(f"{spool}/")}:
        with suppress(psutil.Error):
            pids += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [record for pid in pids if (record := identify(pid))]
