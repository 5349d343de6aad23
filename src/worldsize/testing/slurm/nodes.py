"""Room: machines made of namespaces, and the cables between them: own address, name, processes, /run and /dev/shm.

A machine is the first process of its namespaces. When that is killed, the kernel ends every process of the machine at
once and takes its mounts, its interface and the cable with it; so nothing has to be tidied up, whatever happened
before. One machine is the switch: a bridge, to which all others and this host are plugged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import LaunchError
from worldsize.launch import shell
from worldsize.testing.slurm.daemons import SIGN, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from worldsize.testing.slurm.daemons import Daemons, Record

SWITCH = "switch"
_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")
_PREFIX = "wsslurm"
_NET = "10.213"

_INIT = f"""\
{SIGN}
set -e
name=$1 folder=$2
mount -t proc proc /proc
hostname "$name"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 /run/sshd /run/lock
if [ -e "$folder/etc/hosts" ]; then mount --bind "$folder/etc/hosts" /etc/hosts; fi
if [ -e "$folder/etc/ssh_config" ]; then mount --bind "$folder/etc/ssh_config" /etc/ssh/ssh_config; fi
: >"$0.up"
sleep infinity &
wait "$!"
"""

_SPAWN = 'log=$0; setsid "$@" </dev/null >>"$log" 2>&1 &'
_THERE = 'cd "$0" && exec "$@"'


def refusal(env: Mapping[str, str]) -> str | None:
    """Why this process can make no machines, or None."""
    done = shell.call((*_NAMESPACES, "mount", "-t", "proc", "proc", "/proc"), env)
    return done.err.strip() or f"`unshare` ended with {done.code}" if done.code else None


def boot(names: Sequence[str], folder: Path, daemons: Daemons, env: Mapping[str, str]) -> dict[str, Record]:
    """Start machines, all at once; returns when each has its own name and mounts. They have no cable yet.

    Raises:
        LaunchError: one of them does not come up.
    """
    for name in names:
        daemons.ready(name).unlink(missing_ok=True)
        daemons.start(name, (*_NAMESPACES, "/bin/sh", "-c", _INIT, str(daemons.file(name)), name, str(folder)), env)
    return {name: _booted(name, daemons) for name in names}


def _booted(name: str, daemons: Daemons) -> Record:
    if not until(daemons.ready(name).exists, 20.0, 0.01) or (record := daemons.find(name)) is None:
        said = daemons.log(name).read_text(encoding="utf-8", errors="replace").strip()
        raise LaunchError(f"the machine {name} does not come up", found=said or "it printed nothing")
    return record


def inside(machine: Record, argv: Sequence[str], cwd: Path | str = "/") -> tuple[str, ...]:
    """The command that runs `argv` on a machine."""
    enter = ("nsenter", f"--target={machine.pid}", "--net", "--uts", "--mount", "--pid", "--")
    return (*enter, *there(argv, cwd))


def there(argv: Sequence[str], cwd: Path | str) -> tuple[str, ...]:
    """The command that runs `argv` in a folder."""
    return ("/bin/sh", "-c", _THERE, str(cwd), *argv)


def in_background(argv: Sequence[str], log: Path) -> tuple[str, ...]:
    """The command that leaves `argv` running on the machine where it is executed."""
    return ("/bin/sh", "-c", _SPAWN, str(log), *argv)


def open_switch(switch: Record, env: Mapping[str, str]) -> str:
    """Make the bridge and plug this host to it, in a network that nobody here uses yet. Returns its first three numbers.

    The name of the interface on this host is the claim: only one process can make it, and it goes when the switch does.
    """
    _ip(["link add br0 type bridge", "link set br0 up"], env, at=switch)
    for number in range(1, 255):
        link, subnet = f"{_PREFIX}{number}", f"{_NET}.{number}"
        if _in_use(subnet):
            continue
        done = _try([f"link add {link} type veth peer name host netns {switch.pid}"], env)
        if done.code == 0:
            _ip([f"addr add {subnet}.254/24 dev {link}", f"link set {link} up"], env)
            _ip(["link set host master br0 up"], env, at=switch)
            return subnet
        if "exists" not in done.err:
            raise _refused(done)
    raise LaunchError(
        f"no free network in {_NET}.1.0 to {_NET}.254.0", do="end clusters that are not needed any more"
    )


def plug(switch: Record, machine: Record, address: str, env: Mapping[str, str]) -> None:
    """Lay the cable of a machine. As a real card it keeps its hardware address over a restart: others remember that one."""
    name = machine.name
    _try([f"link del {name}"], env, at=switch)  # the kernel may not be done yet with that of a machine just killed
    hardware = ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])
    cable = f"link add {name} type veth peer name eth0 address {hardware} netns {machine.pid}"
    _ip([cable, f"link set {name} master br0 up"], env, at=switch)
    _ip([f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"], env, at=machine)


def set_link(switch: Record, name: str, state: str, env: Mapping[str, str]) -> None:
    """Take the cable of a machine out ("down") or put it back ("up")."""
    _ip([f"link set {name} {state}"], env, at=switch)


def drop_link(subnet: str, env: Mapping[str, str]) -> None:
    """Take this host's end away now, where the kernel would do it a moment later."""
    _try([f"link del {_PREFIX}{subnet.rpartition('.')[2]}"], env)


def _in_use(subnet: str) -> bool:
    import psutil

    found = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    return any(address.startswith(f"{subnet}.") for address in found)


def _ip(commands: Sequence[str], env: Mapping[str, str], at: Record | None = None) -> None:
    done = _try(commands, env, at)
    if done.code:
        raise _refused(done)


def _try(commands: Sequence[str], env: Mapping[str, str], at: Record | None = None) -> shell.Done:
    enter = ("nsenter", f"--target={at.pid}", "--net", "--") if at else ()
    return shell.call((*enter, "ip", "-batch", "-"), env, text="".join(f"{line}\n" for line in commands))


def _refused(done: shell.Done) -> LaunchError:
    return LaunchError("the network of the nodes cannot be made", found=done.err.strip())
