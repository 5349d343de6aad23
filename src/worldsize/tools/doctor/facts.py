"""Room: what one host is: versions, limits, memory, addresses, cards of its network. Read, never changed; no torch."""

from __future__ import annotations

import os
import platform
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from worldsize.launch import env
from worldsize.runtime import network, visible
from worldsize.tools.doctor import nvidia

_PACKAGES = ("worldsize", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "deepspeed", "horovod")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NO_LIMIT = 1 << 60
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One host. Memory is in MiB, card speeds in Mbit/s; None: no limit, or not known."""

    hostname: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    kernel: str = ""
    cpus: int = 1
    memory: int | None = None
    memory_limit: int | None = None
    files: int | None = None
    locked: int | None = None
    """KiB of memory that may be locked."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Own address -> interface."""
    speeds: dict[str, int] = field(default_factory=dict)
    """Interface -> its speed, where the card says one."""
    rdma: dict[str, float] = field(default_factory=dict)
    """Devices of InfiniBand and RoCE -> Gbit/s of their ports that are up."""
    ephemeral: tuple[int, int] = (32768, 60999)
    """The ports that are given to whoever asks for any."""
    smi: dict[str, str] = field(default_factory=dict)
    visible: int | None = None
    """How many GPUs CUDA_VISIBLE_DEVICES lists; None: it is not set."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """From plain values."""
        low, high = values["ephemeral"]
        return cls(**{**values, "ephemeral": (low, high)})

    @property
    def gpus(self) -> list[nvidia.Gpu]:
        """Its GPUs, used or not."""
        return nvidia.gpus(self.smi.get("query", ""))

    @property
    def ranks(self) -> int:
        """How many ranks a measurement of collectives has here: one for each GPU it may use, or one."""
        count = len(self.gpus)
        return max(1, count if self.visible is None else min(self.visible, count))


def take() -> Facts:
    """Those of this host."""
    environ = env.read()
    listed = visible.entries(environ.get(visible.VISIBLE))
    addresses = network.interfaces()
    return Facts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        kernel=platform.release(),
        cpus=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB,
        memory_limit=cgroup_limit(),
        files=_limit(resource.RLIMIT_NOFILE, 1),
        locked=_limit(resource.RLIMIT_MEMLOCK, 1024),
        addresses=addresses,
        speeds={name: speed for name in set(addresses.values()) if (speed := card_speed(name))},
        rdma=rdma(),
        ephemeral=_ephemeral(),
        smi=nvidia.ask(environ),
        visible=None if listed is None else len(listed),
    )


def card_speed(interface: str, root: Path = Path("/sys/class/net")) -> int | None:
    """Mbit/s of a card; None where it says nothing sensible. A pair of virtual ends has no speed of its own."""
    try:
        if any((root / interface / kind).exists() for kind in ("device", "bonding")):
            return max(int((root / interface / "speed").read_text(encoding="ascii")), 0) or None
    except (OSError, ValueError):
        pass
    return None


def rdma(root: Path = Path("/sys/class/infiniband")) -> dict[str, float]:
    """Device -> Gbit/s of its ports that are up: `rate` says "400 Gb/sec (4X NDR)", `state` "4: ACTIVE"."""
    found: dict[str, float] = {}
    for port in sorted(root.glob("*/ports/*")):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (port / "state").read_text(encoding="ascii"):
                rate = float((port / "rate").read_text(encoding="ascii").split()[0])
                found[port.parents[1].name] = found.get(port.parents[1].name, 0.0) + rate
    return found


def cgroup_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """MiB that the control group of this process, or one around it, may use; None: all that there are."""
    found: list[int] = []
    with suppress(OSError):
        for line in proc.read_text(encoding="utf-8").splitlines():
            _, kinds, path = [*line.split(":", 2), "", ""][:3]
            if kinds not in ("", "memory") and "memory" not in kinds.split(","):
                continue
            top, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
            here = top / path.lstrip("/")
            for folder in (here, *here.parents):
                if folder.is_relative_to(top):
                    found += _bytes(folder / name)
    return min(found) // _MIB if found else None


def _bytes(file: Path) -> list[int]:
    try:
        value = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" is no number
        return []
    return [value] if value < _NO_LIMIT else []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _limit(which: int, unit: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft // unit


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return (32768, 60999)
    return low, high
