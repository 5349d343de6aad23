"""Room: a cluster's life: up, its nodes killed, cut off and brought back, down. Ours alone: every id is in its folder."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from worldsize.errors import ConfigError, LaunchError
from worldsize.launch import env, shell
from worldsize.runtime.network import reachable
from worldsize.testing.slurm import config, needs
from worldsize.testing.slurm.config import CONTROLLER, Site
from worldsize.testing.slurm.daemons import Daemons, until
from worldsize.testing.slurm.database import Database
from worldsize.testing.slurm.places import Apart, Here, Places, free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

_STATE = "cluster.json"
_FOLDERS = ("etc", "state", "log", "run", "dev", "spool")
_LONGEST = 60
"""Characters of the folder: sockets below it may have 107."""
_PRIVATE = ("/dev/shm", "/run", "/proc")  # noqa: S108 - named to be refused
_START, _ANSWER = 60.0, 3.0
"""Seconds that a start and a connection may take."""
_NVIDIA = 195
"""The major number of NVIDIA's devices."""


class Cluster:
    """A Slurm cluster of this machine.

    Args:
        nodes: how many: node1, node2, ... The controller's machine is "ctl".
        gpus: of each node. Slurm counts and deals them out; nothing can be computed on them.
        accounting: slurmdbd and a database, for sacct.
        ssh: an sshd on every node; see `ssh_config`.
        loopback: all nodes share this machine's loopback. So they do where nodes cannot be kept apart (not root, or no
            namespaces here); `loopback` says it.
        folder: everything that the cluster keeps; a fresh temporary one if None. It goes at the end.
        outlive: go on after this process; `Cluster.at(folder)` finds it again. Else it ends with this process,
            however that ends.
    """

    def __init__(
        self,
        nodes: int = 4,
        gpus: int = 0,
        *,
        accounting: bool = False,
        ssh: bool = False,
        loopback: bool = False,
        folder: Path | str | None = None,
        outlive: bool = False,
    ) -> None:
        self._base = needs.environment(env.read())
        self.why_loopback = "as asked" if loopback else needs.no_namespaces(self._base)
        self._count, self._gpus, self._accounting, self._ssh = nodes, gpus, accounting, ssh
        self.loopback, self._outlive = self.why_loopback is not None, outlive
        self.folder = Path(
            folder or Path(tempfile.gettempdir()) / f"worldsize-slurm-{secrets.token_hex(4)}"
        ).absolute()
        self._site: Site | None = None
        self._places: Places | None = None
        self._daemons = Daemons(self.folder, outlive=True)

    @classmethod
    def at(cls, folder: Path | str) -> Self:
        """The cluster that was started in this folder, running or not.

        Raises:
            ConfigError: none was, or by another user.
        """
        folder = Path(folder).absolute()
        state = folder / _STATE
        if not state.is_file():
            raise ConfigError(f"no cluster was started in {folder}", do="start one with up, or give its --dir")
        if state.stat().st_uid != os.geteuid():
            raise ConfigError(
                f"the cluster in {folder} is another user's",
                found=f"user id {state.stat().st_uid}",
                do=f"to submit jobs, set SLURM_CONF={folder}/etc/slurm.conf",
            )
        told = json.loads(state.read_text(encoding="utf-8"))
        cluster = cls(loopback=True, folder=folder, outlive=True)
        cluster.loopback = told["loopback"]
        cluster._site = Site.of(told["site"]) if told["site"] else None
        return cluster

    @property
    def env(self) -> dict[str, str]:
        """What Slurm's commands need in their environment to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes'."""
        return tuple(node.name for node in self.site.nodes)

    @property
    def machines(self) -> tuple[str, ...]:
        """The controller's and the nodes'."""
        return (CONTROLLER, *self.names)

    @property
    def site(self) -> Site:
        """Addresses, ports and settings.

        Raises:
            ConfigError: it is not up.
        """
        if self._site is None:
            raise ConfigError(f"the cluster in {self.folder} is not up", do="start it with up")
        return self._site

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: opens every node by its name, from here; on the nodes it is the system's own."""
        return self.site.etc("ssh_config")

    def up(self) -> None:
        """Start it; returns when all nodes are idle. What an earlier start left in the folder is ended first.

        Raises:
            ConfigError: these settings cannot be.
            NotStartedError: programs are missing.
            LaunchError: something does not come up. The logs stay in the folder.
        """
        needs.check_settings(self._count, self._gpus, ssh=self._ssh, loopback=self.loopback)
        needs.check(needs.packages(self._base, accounting=self._accounting, ssh=self._ssh))
        self._prepare()
        try:
            self._site = site = self._plan()
            self._write(site)
            self._munge()
            self._grounds.boot(site, self.machines)
            self._start_controller()
            for name in self.names:
                self._start_node(name)
            self.wait_idle()
        except BaseException:
            self._stop()
            raise

    def install(self) -> None:
        """Install what `up` would miss.

        Raises:
            NotStartedError: this is not root on Debian.
            LaunchError: the packages cannot be installed.
        """
        needs.install(needs.packages(self._base, accounting=self._accounting, ssh=self._ssh), self._base)

    def down(self) -> None:
        """End everything that was started, whatever state it is in, and remove the folder. Safe to call twice."""
        self._stop()
        if (self.folder / _STATE).exists():
            shutil.rmtree(self.folder)

    def run(
        self, argv: Sequence[str], *, timeout: float | None = 60.0, cwd: Path | None = None, text: str = ""
    ) -> shell.Done:
        """Run a command, Slurm's own ones usually, on this host with the cluster's environment."""
        return shell.call(argv, self._env, timeout=timeout, cwd=cwd, text=text)

    def exec(
        self, name: str, argv: Sequence[str], *, timeout: float | None = 60.0, cwd: Path | str = "/"
    ) -> shell.Done:
        """Run a command on a node, outside of any job."""
        return shell.call(self.command(name, argv, cwd), self._env, timeout=timeout)

    def command(self, name: str, argv: Sequence[str], cwd: Path | str = "/") -> tuple[str, ...]:
        """What `exec` executes, for those who start it themselves, with `env` in its environment."""
        return self._grounds.command(self._known(name), argv, cwd)

    def kill(self, name: str) -> None:
        """A power cut: every process of the node ends at once. On loopback: its slurmd and its jobs' processes do."""
        self._grounds.kill(self._known(name))

    def start(self, name: str) -> None:
        """Bring a killed node back, or the controller. Jobs that Slurm still believes to be on the node start again."""
        if self._grounds.alive(self._known(name)):
            raise ConfigError(f"{name} is running", do=f"nothing, or kill it first: kill-node {name}")
        if name != CONTROLLER and self.alive(CONTROLLER):
            # Slurm tells a reboot by the time since boot, which is that of this machine: it would wait for lost jobs.
            self._update(name, "down")
        self._grounds.boot(self.site, (name,))
        if name == CONTROLLER:
            self._start_controller()
        else:
            self._start_node(name)
            self._await(f"{name}.slurmd", lambda: self._answers(name))

    def cut(self, name: str) -> None:
        """Take the node's cable out. What runs there goes on, and reaches nobody."""
        self._grounds.link(self._known(name), "down")

    def join(self, name: str) -> None:
        """Put the cable back."""
        self._grounds.link(self._known(name), "up")

    def alive(self, name: str) -> bool:
        """Whether the node has power."""
        return self._grounds.alive(self._known(name))

    def states(self) -> dict[str, str]:
        """Node -> its state as sinfo's %t says it: idle, mix, alloc, comp, down; with a * while it does not answer."""
        lines = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %t"], timeout=30.0).out.splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, timeout: float = _START) -> None:
        """Wait until every node is idle.

        Raises:
            LaunchError: one is not, after so many seconds.
        """
        if not until(self._idle, timeout, 0.1):
            raise LaunchError(
                f"not all nodes are idle after {timeout:g} s",
                found=f"{self.states() or 'no answer of slurmctld'}",
                do=f"read {self.folder}/log",
            )

    def restore(self) -> None:
        """As after `up`: no jobs, every machine on, plugged in and answering, all nodes idle."""
        self._heal(CONTROLLER)
        for state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.run(["scancel", f"--state={state}"])
        for name in self.names:
            self._heal(name)
        self._resume("down", "drain", "drng")
        self.wait_idle()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def _env(self) -> dict[str, str]:
        return {**self._base, **self.env}

    @property
    def _grounds(self) -> Places:
        if self._places is None:
            self._places = (Here if self.loopback else Apart)(self.folder, self._daemons, self._env)
        return self._places

    def _known(self, name: str) -> str:
        if name not in self.machines:
            raise ConfigError(f"there is no node {name}", found=f"{', '.join(self.machines)}")
        return name

    def _idle(self) -> bool:
        return self.states() == dict.fromkeys(self.names, "idle")

    def _resume(self, *states: str) -> None:
        """Let nodes in these states take jobs again."""
        for name, found in self.states().items():
            if found.rstrip("*") in states:
                self._update(name, "resume")

    def _update(self, name: str, state: str) -> None:
        self.run(["scontrol", "update", f"nodename={name}", f"state={state}", "reason=restore"])

    def _heal(self, name: str) -> None:
        if self.alive(name):
            if not self.loopback:
                self.join(name)
            if self._answers(name):
                return
            self.kill(name)
        self.start(name)

    def _answers(self, name: str) -> bool:
        """Whether its main daemon accepts connections."""
        host = next(host for host in (self.site.controller, *self.site.nodes) if host.name == name)
        return reachable(host.address, host.port, _ANSWER)

    def _prepare(self) -> None:
        """A folder of ours, empty, that every node will see."""
        if not self.loopback and str(self.folder).startswith(_PRIVATE):
            raise ConfigError(f"{self.folder} is another one on every node", do="choose a folder elsewhere")
        if len(str(self.folder)) > _LONGEST:
            raise ConfigError(
                f"{self.folder} is too long a path for sockets", do=f"choose one of {_LONGEST} characters"
            )
        if (self.folder / _STATE).exists():
            type(self).at(self.folder).down()
        try:
            self.folder.mkdir(mode=0o755)
        except FileExistsError:
            raise ConfigError(
                f"{self.folder} is there and not a cluster's folder", do="choose one that does not exist"
            ) from None
        self.folder.chmod(0o755)
        for name in _FOLDERS:
            (self.folder / name).mkdir(mode=0o755)
        self._remember()
        self._daemons = Daemons(self.folder, outlive=self._outlive)
        self._places = None

    def _plan(self) -> Site:
        controller, nodes, subnet = self._grounds.spread(self._count)
        extra = free_ports(2) if self.loopback else [6819, 3306]
        return Site(
            folder=self.folder,
            user=getpass.getuser(),
            controller=controller,
            nodes=nodes,
            subnet=subnet,
            own_address=self.loopback and needs.own_address() is not None,
            gpus=self._gpus,
            accounting_port=extra[0] if self._accounting else None,
            database_port=extra[1],
            ssh=self._ssh,
            version=needs.version(self._base),
        )

    def _write(self, site: Site) -> None:
        self._remember()
        for name, text in config.files(site).items():
            site.etc(name).write_text(text, encoding="utf-8")
        if site.accounting_port is not None:
            site.etc("slurmdbd.conf").chmod(0o600)
        site.etc("munge.key").touch(mode=0o600)
        site.etc("munge.key").write_bytes(secrets.token_bytes(1024))
        for number in range(site.gpus):
            device = self.folder / "dev" / f"nvidia{number}"
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(_NVIDIA, number))
            device.chmod(0o666)
        for name in ("ssh_host_key", "id") if site.ssh else ():
            shell.call(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(site.etc(name))), self._base)

    def _remember(self) -> None:
        told = {"loopback": self.loopback, "site": self._site.plain() if self._site else None}
        (self.folder / _STATE).write_text(json.dumps(told), encoding="utf-8")

    def _munge(self) -> None:
        """One for all: its socket is a file, which every node sees."""
        folder, run = self.folder, self.folder / "run"
        paths = {
            "key-file": self.site.etc("munge.key"),
            "socket": self.site.munge_socket,
            "seed-file": run / "munge.seed",
        }
        paths |= {"pid-file": run / "munged.pid", "log-file": folder / "log" / "munged.log"}
        argv = ("munged", "--foreground", "--num-threads=4", *(f"--{name}={path}" for name, path in paths.items()))
        # The folder may lie in a private one of a test, which --force allows.
        self._daemons.start("munged", (*argv, "--force"), self._env)
        self._await("munged", lambda: self.run(["munge", "-n", f"--socket={self.site.munge_socket}"]).code == 0)

    def _start_controller(self) -> None:
        if self.site.accounting_port is not None:
            Database(self.site, self._grounds, self._env, self._await).start()
        self._grounds.daemon(CONTROLLER, "slurmctld", ("slurmctld", "-D"))
        self._await(f"{CONTROLLER}.slurmctld", lambda: self._answers(CONTROLLER))

    def _start_node(self, name: str) -> None:
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        self._grounds.daemon(name, "slurmd", ("slurmd", "-D", "-N", name))
        if self.site.ssh:
            self._grounds.daemon(name, "sshd", ("/usr/sbin/sshd", "-D", "-f", str(self.site.etc("sshd_config"))))

    def _await(self, name: str, fact: Callable[[], bool]) -> None:
        if not until(fact, _START, 0.02):
            said = self._daemons.log(name).read_text(encoding="utf-8", errors="replace").strip()
            raise LaunchError(
                f"{name} does not come up", found=said[-500:] or "it printed nothing", do=f"read {self.folder}/log"
            )

    def _stop(self) -> None:
        self._grounds.vanish(self._site.subnet if self._site else None)
        self._daemons.close()
