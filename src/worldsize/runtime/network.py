"""Room: how the ranks reach each other: endpoints, own address, is anybody listening. No torch; knows no launcher."""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import TYPE_CHECKING

from worldsize.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from worldsize.world import World

_LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation: a route to them is the default route, and nothing is ever sent."""
_RETRY_S = 0.1


def split_endpoint(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of "host:29400", "10.0.0.1:29400" or "[::1]:29400"; the host comes without brackets.

    Raises:
        WorldError: no port and no `default_port`, a port outside 1-65535, or an IPv6 address without brackets (where
            "::1:29400" could be read both ways).
    """
    host, bracket, rest = text.removeprefix("[").partition("]") if text.startswith("[") else ("", "", text)
    if not bracket:
        host, _, rest = text.partition(":")
        rest = text[len(host) :]
    port = rest.removeprefix(":") if rest else str(default_port or "")
    plain = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16 and (not rest or rest.startswith(":"))
    if not host or not plain or (bracket and not _is_ipv6(host)) or any(c in "[]/ " for c in host):
        raise WorldError(f"{text!r} is not an endpoint", do="write host:port, or [address]:port where it is IPv6")
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Write host:port, with brackets where the host is an IPv6 address: the inverse of `split_endpoint`."""
    return f"[{host}]:{port}" if _is_ipv6(host) else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether the text is a loopback address or one of its usual names. Resolves nothing."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in _LOCAL_NAMES


def check_own_address(
    world: World,
    environ: Mapping[str, str],
    *,
    hostname: str | None = None,
    resolve: Callable[[str], Iterable[str]] | None = None,
) -> str | None:
    """The interface to export as GLOO_SOCKET_IFNAME, or None where nothing must be exported.

    On several nodes, a host whose own name resolves to loopback (Debian writes "127.0.1.1 node1") would tell its
    peers to connect to themselves. A name set by the user is never replaced, and one node keeps loopback.

    Args:
        world: who must be reached.
        environ: the environment, for the user's own choice.
        hostname: this host's name, by default the system's.
        resolve: name to addresses, by default the system's resolver.

    Raises:
        WorldError: the name resolves to loopback and the interface to use cannot be told.
    """
    if world.nodes == 1 or environ.get("GLOO_SOCKET_IFNAME"):
        return None
    name, resolve = hostname or socket.gethostname(), resolve or addresses
    own = list(resolve(name))
    if own and not all(is_loopback(address) for address in own):
        return None
    interface = _interface_towards(world.master_addr, resolve)
    if interface is None:
        raise WorldError(
            f"this host's name {name} resolves to {', '.join(own) or 'nothing'}: other nodes cannot reach that",
            found=f"rank {world.rank}, {world.nodes} nodes, interfaces {', '.join(interfaces().values()) or 'none'}",
            do="set GLOO_SOCKET_IFNAME to the interface between the nodes, or mend /etc/hosts",
        )
    return interface


def check_master(world: World, resolve: Callable[[str], Iterable[str]] | None = None) -> None:
    """Raise WorldError where the name of rank 0's host cannot be resolved: it would be retried until killed."""
    if world.master_addr is None or list((resolve or addresses)(world.master_addr)):
        return
    raise WorldError(
        f"MASTER_ADDR={world.master_addr} cannot be resolved on {socket.gethostname()}",
        found=f"rank {world.rank} of {world.size}, node {world.node} of {world.nodes}, launcher {world.launcher}",
        do="set MASTER_ADDR to an address, or make the name known on every node",
    )


def addresses(name: str) -> list[str]:
    """The addresses of a host name, none where it does not resolve."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def address_of(interface: str) -> str:
    """The first address of an interface of this host. Raises WorldError where it has none."""
    for address, name in interfaces().items():
        if name == interface:
            return address
    raise WorldError(
        f"interface {interface} has no address on {socket.gethostname()}",
        found=", ".join(sorted(set(interfaces().values()))) or "no interface but loopback",
        do="name one of these in the site profile",
    )


def outward_address() -> str | None:
    """The own address from which packets to other hosts leave, None where there is no such route."""
    sources = map(source_towards, _OUTSIDE.values())
    return next((source for source in sources if source is not None and not is_loopback(source)), None)


def reachable(host: str, port: int, timeout: float) -> bool:
    """Whether somebody accepts a TCP connection there within `timeout` seconds; tries again until then."""
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(end - time.monotonic(), _RETRY_S)):
                return True
        except OSError:
            if time.monotonic() + _RETRY_S >= end:
                return False
            time.sleep(_RETRY_S)


def no_answer(world: World, elapsed: float, why: str | None = None) -> WorldError:
    """The error for a rank that did not reach the others: the endpoint, who should have listened, the time waited."""
    endpoint = join_endpoint(str(world.master_addr), world.master_port or 0)
    who = "rank 0 (this process)" if world.rank == 0 else "rank 0 on the first node"
    do = "see whether every rank was started"
    if world.rank:
        do = f"see whether rank 0 was started, and whether a firewall closes port {world.master_port}"
    return WorldError(
        f"no meeting of {world.size} ranks at {endpoint} within {elapsed:.0f} s, where {who} listens",
        found=f"rank {world.rank} on node {world.node} of {world.nodes}{f': {why}' if why else ''}",
        do=do,
    )


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False


def _interface_towards(master: str | None, resolve: Callable[[str], Iterable[str]]) -> str | None:
    """The interface that routes to rank 0's host; on that host, whose name may be loopback, the default route's."""
    known = interfaces()
    for address in [*(resolve(master) if master else ()), *_OUTSIDE.values()]:
        source = source_towards(address)
        if source in known:
            return known[source]
    names = set(known.values())
    return names.pop() if len(names) == 1 else None


def source_towards(address: str) -> str | None:
    """The own address from which packets to `address` would leave. Sends nothing."""
    family = socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interfaces() -> dict[str, str]:
    """Own address -> interface, for all but loopback and link-local addresses."""
    import psutil

    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            address = entry.address.partition("%")[0]
            if entry.family in _OUTSIDE and not (is_loopback(address) or ipaddress.ip_address(address).is_link_local):
                found[address] = name
    return found
