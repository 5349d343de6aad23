"""Room: what a cluster needs of this machine: programs, the packages they come in, rights. Asked before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, LaunchError, NotStartedError
from worldsize.launch import shell
from worldsize.testing.slurm import nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb": "mariadb-client"}
_PLUGIN = ("accounting_storage_mysql.so", "slurm-wlm-mysql-plugin")
_SSH = {"sshd": "openssh-server", "ssh-keygen": "openssh-client"}
_NAMESPACES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """What commands of a cluster find: where daemons are installed, and nothing of a Slurm job that this may be."""
    kept = {name: value for name, value in base.items() if not name.startswith("SLURM")}
    return {**kept, "PATH": f"{base.get('PATH', os.defpath)}:{_SBIN}"}


def packages(env: Mapping[str, str], *, accounting: bool = False, ssh: bool = False) -> dict[str, str]:
    """Program -> Debian package, for what is not installed here."""
    wanted = _SLURM | (_ACCOUNTING if accounting else {}) | (_SSH if ssh else {})
    missing = {name: package for name, package in wanted.items() if not shutil.which(name, path=env["PATH"])}
    if accounting and not _plugin_is_there():
        missing[_PLUGIN[0]] = _PLUGIN[1]
    return missing


def check(missing: Mapping[str, str]) -> None:
    """Raise NotStartedError where programs are missing, with the command that brings them."""
    if missing:
        raise NotStartedError(
            "not all that a Slurm cluster needs is installed here",
            found=f"no {', '.join(sorted(missing))}",
            do=f"`{' '.join(_apt(missing.values()))}` as root on Debian, or add --install",
        )


def install(missing: Mapping[str, str], env: Mapping[str, str]) -> None:
    """Install them.

    Raises:
        NotStartedError: this is not root on Debian.
        LaunchError: apt-get failed.
    """
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NotStartedError(
            "--install works as root on Debian and its kin",
            found=f"user id {os.geteuid()}, {'apt-get' if shutil.which('apt-get') else 'no apt-get'}",
            do=f"let an administrator run `{' '.join(_apt(missing.values()))}`",
        )
    quiet = {**env, "DEBIAN_FRONTEND": "noninteractive"}
    shell.call(("apt-get", "update", "-qq"), quiet)
    done = shell.call(_apt(missing.values()), quiet)
    if done.code:
        raise LaunchError("apt-get could not install what is missing", found=done.err.strip()[-500:])


def no_namespaces(env: Mapping[str, str]) -> str | None:
    """Why nodes cannot have an address of their own here, or None."""
    if os.geteuid() != 0:
        return f"this is user {os.geteuid()}, not root"
    missing = [name for name in _NAMESPACES if not shutil.which(name, path=env["PATH"])]
    if missing:
        return f"no {', '.join(missing)}"
    return nodes.refusal(env)


def check_settings(count: int, gpus: int, *, ssh: bool, loopback: bool) -> None:
    """Raise ConfigError for a cluster that cannot be."""
    if not 1 <= count <= 200:  # noqa: PLR2004 - the addresses of a network of three numbers, some left for us
        raise ConfigError("nodes is not a number from 1 to 200", found=str(count), do="choose another one")
    if gpus < 0:
        raise ConfigError("gpus is negative", found=str(gpus), do="give the number of GPUs of each node")
    if gpus and os.geteuid() != 0:
        raise ConfigError(
            "pretended GPUs need root, for mknod", found=f"user id {os.geteuid()}", do="leave --gpus out"
        )
    if ssh and loopback:
        raise ConfigError("ssh into nodes needs nodes with their own addresses", found="loopback", do="leave one out")


def version(env: Mapping[str, str]) -> tuple[int, int]:
    """Slurm's, as (22, 5)."""
    found = re.search(r"(\d+)\.(\d+)", shell.call(("slurmd", "-V"), env).out)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def own_address() -> str | None:
    """The loopback address that this machine's own name leads to, None where it leads elsewhere or nowhere."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return address if address.startswith("127.") else None


def _apt(names: Iterable[str]) -> tuple[str, ...]:
    return ("apt-get", "install", "-y", "--no-install-recommends", *sorted(set(names)))


def _plugin_is_there() -> bool:
    return any(True for root in ("/usr/lib", "/usr/lib64") for _ in Path(root).glob(f"**/slurm*/{_PLUGIN[0]}"))
