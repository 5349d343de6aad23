"""Room: what Slurm, its database and sshd are told: settings to text. Nothing is read, written or started here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

CONTROLLER = "ctl"
"""The name of the machine that slurmctld and the database run on."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where a daemon can be found."""

    name: str
    """What Slurm calls it."""
    hostname: str
    """What `hostname` says there."""
    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Everything that the texts below depend on."""

    folder: Path
    """Holds the configuration, logs, state and sockets: the same path on every node."""
    user: str
    """Who the daemons run as."""
    controller: Host
    nodes: tuple[Host, ...]
    subnet: str | None
    """The first three numbers of the nodes' addresses; None where all share this machine's loopback."""
    own_address: bool = False
    """On loopback: whether this machine's own name leads there too, so that daemons may listen there alone."""
    gpus: int = 0
    cpus: int = 8
    memory: int = 16000
    """MiB of a node, as Slurm counts them; nothing is reserved."""
    accounting_port: int | None = None
    """slurmdbd's port; None without accounting."""
    database_port: int = 3306
    ssh: bool = False
    version: tuple[int, int] = (22, 5)
    """Slurm's."""

    def etc(self, name: str) -> Path:
        """A file of the configuration."""
        return self.folder / "etc" / name

    @property
    def munge_socket(self) -> Path:
        """Where clients and daemons find munged."""
        return self.folder / "run" / "munge.sock"

    @property
    def database_socket(self) -> Path:
        """Where the database listens besides its port."""
        return self.folder / "run" / "mysql.sock"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "folder": str(self.folder)}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """The site that `plain` was made of."""
        nodes = tuple(Host(**node) for node in plain["nodes"])
        known = {"folder": Path(plain["folder"]), "controller": Host(**plain["controller"]), "nodes": nodes}
        return cls(**{**plain, **known, "version": tuple(plain["version"])})


def files(site: Site) -> dict[str, str]:
    """Name -> text of every file of the configuration that this site needs."""
    texts = {"slurm.conf": slurm_conf(site), "cgroup.conf": cgroup_conf(site), "hosts": hosts(site)}
    if site.gpus:
        texts["gres.conf"] = gres_conf(site)
    if site.accounting_port is not None:
        texts["slurmdbd.conf"] = slurmdbd_conf(site)
    if site.ssh:
        texts |= {"sshd_config": sshd_config(site), "ssh_config": ssh_config(site)}
    return texts


def slurm_conf(site: Site) -> str:
    """The configuration that clients and daemons share."""
    return _text(_general(site), _times(), _scheduling(site), _accounting(site), _nodes(site), _partitions())


def gres_conf(site: Site) -> str:
    """Every node has all devices of the folder: it must be devices, or Slurm sets no CUDA_VISIBLE_DEVICES."""
    devices = f"{site.folder}/dev/nvidia[0-{site.gpus - 1}]"
    return _text([f"NodeName={node.name} Name=gpu File={devices}" for node in site.nodes])


def cgroup_conf(site: Site) -> str:
    """No cgroups: they are this machine's, and not every container may make some. Old versions have no such word."""
    return "CgroupPlugin=disabled\n" if site.version >= (24, 5) else ""


def slurmdbd_conf(site: Site) -> str:
    """The link between Slurm and the database."""
    return _text([
        "AuthType=auth/munge",
        f"AuthInfo=socket={site.munge_socket}",
        f"DbdHost={site.controller.hostname}",
        f"DbdAddr={site.controller.address}",
        f"DbdPort={site.accounting_port}",
        f"SlurmUser={site.user}",
        f"PidFile={site.folder}/run/slurmdbd.pid",
        f"LogFile={site.folder}/log/slurmdbd.log",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={site.database_port}",
        "StorageUser=slurm",
        "StoragePass=slurm",
        "StorageLoc=slurm_acct",
        "CommitDelay=1",
    ])  # fmt: skip


def database_sql(user: str = "slurm") -> str:
    """What the database is told once."""
    grants = [
        f"CREATE USER IF NOT EXISTS {user}@'{host}' IDENTIFIED BY '{user}'; GRANT ALL ON slurm_acct.* TO {user}@'{host}';"
        for host in ("localhost", "127.0.0.1")
    ]
    return _text(["CREATE DATABASE IF NOT EXISTS slurm_acct;", *grants])


def hosts(site: Site) -> str:
    """/etc/hosts of every node."""
    lines = ["127.0.0.1 localhost"]
    if site.subnet is not None:
        lines += [f"{host.address} {host.hostname}" for host in (site.controller, *site.nodes)]
        lines += [f"{site.subnet}.254 login"]
    return _text(lines)


def sshd_config(site: Site) -> str:
    """Every node's sshd: the one key of this site opens it, from inside the site's own network alone."""
    return _text([
        "Port 22",
        f"HostKey {site.etc('ssh_host_key')}",
        f"AuthorizedKeysFile {site.etc('id.pub')}",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "StrictModes no",
        "UsePAM no",
        "PidFile none",
        "AcceptEnv *",
    ])  # fmt: skip


def ssh_config(site: Site) -> str:
    """For clients, here (`ssh -F`) and on the nodes, where it is the system's."""
    known = [
        f"Host {' '.join(node.name for node in site.nodes)} {site.subnet}.*",
        f"  IdentityFile {site.etc('id')}",
        f"  User {site.user}",
        "  StrictHostKeyChecking no",
        "  UserKnownHostsFile /dev/null",
        "  LogLevel ERROR",
    ]
    return _text(known, [line for node in site.nodes for line in (f"Host {node.name}", f"  HostName {node.address}")])


def _general(site: Site) -> list[str]:
    folder = site.folder
    return [
        "ClusterName=lab",
        f"SlurmctldHost={site.controller.hostname}({site.controller.address})",
        f"SlurmctldPort={site.controller.port}",
        f"SlurmUser={site.user}",
        f"SlurmdUser={site.user}",
        "AuthType=auth/munge",
        # A requeued job may begin when its credential has expired: 120 s later, if nothing else is said.
        f"AuthInfo=socket={site.munge_socket},cred_expire=5",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdPidFile={folder}/run/slurmd.%n.pid",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "MailProg=/bin/true",
        "PropagateResourceLimits=NONE",
        *(["CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"] if site.own_address else []),
    ]


def _times() -> list[str]:
    """Seconds where a site would have minutes, so that what fails is seen to fail while a test waits."""
    return [
        "SlurmctldTimeout=30",
        "SlurmdTimeout=5",
        "MessageTimeout=5",
        "KillWait=5",
        "MinJobAge=3600",
        "InactiveLimit=0",
        "Waittime=0",
        "OverTimeLimit=0",
        "ReturnToService=2",
        "JobRequeue=1",
    ]


def _scheduling(site: Site) -> list[str]:
    return [
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_min_interval=0,bf_interval=1,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerCPU=500",
        "PriorityType=priority/basic",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SlurmctldParameters=preempt_send_user_signal",
        *(["GresTypes=gpu"] if site.gpus else []),
    ]


def _accounting(site: Site) -> list[str]:
    gathered = ["JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=task=1"]
    if site.accounting_port is None:
        return gathered
    return [
        *gathered,
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={site.controller.address}",
        f"AccountingStoragePort={site.accounting_port}",
        # AuthInfo does not count on this link: without this line slurmctld ends with "no TRES".
        f"AccountingStoragePass={site.munge_socket}",
        "AccountingStoreFlags=job_comment,job_script,job_env",
        *(["AccountingStorageTRES=gres/gpu"] if site.gpus else []),
    ]


def _nodes(site: Site) -> list[str]:
    shape = f"CPUs={site.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={site.cpus} ThreadsPerCore=1"
    shape += f" RealMemory={site.memory}{f' Gres=gpu:{site.gpus}' if site.gpus else ''} State=UNKNOWN"
    return [
        f"NodeName={node.name} NodeHostname={node.hostname} NodeAddr={node.address} Port={node.port} {shape}"
        for node in site.nodes
    ]


def _partitions() -> list[str]:
    """Jobs of `high` send those of the others back into the queue; those of `spot` are warned first."""
    return [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 State=UP",
        "PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=20 PreemptMode=OFF State=UP",
        "PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 PriorityTier=10 State=UP",
        "PartitionName=spot Nodes=ALL MaxTime=INFINITE PriorityTier=10 GraceTime=20 State=UP",
    ]


def _text(*parts: list[str]) -> str:
    return "".join(f"{line}\n" for part in parts for line in part)
