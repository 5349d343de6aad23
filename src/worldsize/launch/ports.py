"""Room: TCP ports and addresses of this host, and how a port is promised to a process that binds it later."""

from __future__ import annotations

import socket

from worldsize.errors import NotStartedError

_WILDCARDS = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))  # noqa: S104 - reserved, not listened on


def reserve(port: int = 0) -> socket.socket:
    """A socket bound to `port` (0: a free one) on every address, not listening. Keep it for as long as the promise.

    On Linux a port that is bound with SO_REUSEADDR and not listened on can be bound and listened on by one more
    socket that sets SO_REUSEADDR too, as torch's TCPStore does; the kernel hands it to nobody who asks for "any
    port", neither for binding nor for connecting. So the port is ours until the socket is closed: no race is left.

    Raises:
        NotStartedError: another process has the port.
    """
    for family, address in _WILDCARDS:
        try:
            return _bound(family, address, port)
        except OSError as error:
            reason = error
    raise NotStartedError(
        f"port {port} is not free on this host",
        found=str(reason),
        do="leave --master-port out, and a free one is found; or end what uses it",
    ) from reason


def listen(host: str, port: int) -> socket.socket | None:
    """A listening socket at this endpoint; None where `host` is not an address of this machine.

    It listens on every address, unless `host` is a loopback one: a host whose own name resolves to 127.0.1.1 must be
    reachable by its peers all the same.

    Raises:
        NotStartedError: the host cannot be resolved.
        OSError: the port is taken.
    """
    from worldsize.runtime.network import is_loopback

    found = _own(host)
    if found is None:
        return None
    family, address = found
    if not is_loopback(host):
        family, address = _WILDCARDS[0] if socket.has_dualstack_ipv6() else _WILDCARDS[1]
    server = _bound(family, address, port)
    server.listen(128)
    return server


def _own(host: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotStartedError(
            f"the rendezvous host {host} cannot be resolved on {socket.gethostname()}",
            found=str(error),
            do="write an address, or make the name known on every node",
        ) from error
    for family, _, _, _, address in places:
        try:
            _bound(family, str(address[0]), 0).close()
        except OSError:
            continue
        return family, str(address[0])
    return None


def _bound(family: int, address: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound
