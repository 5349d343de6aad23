"""A promised port is nobody else's."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from worldsize.errors import LaunchError
from worldsize.launch import ports

EXHAUST = """
import socket
from worldsize.launch import ports
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("40001 40021")
promised = ports.reserve()
port, others, held = promised.getsockname()[1], set(), []
for family in (socket.AF_INET, socket.AF_INET6):
    for reuse in (0, 1):
        try:
            while True:
                other = socket.socket(family)
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                other.bind(("", 0))
                held.append(other)
                others.add(other.getsockname()[1])
        except OSError:
            pass
print(port in others, len(others))
"""


@pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="needs Linux network namespaces")
def test_the_kernel_gives_a_promised_port_to_nobody() -> None:
    """B044: of a range of 21 ports, all but the promised one can be had by asking for any port."""
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", EXHAUST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
    assert done.stdout == "False 20\n", done.stderr


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_of_torch_listens_on_a_promised_port(host: str, libuv: bool) -> None:
    """B044: rank 0's TCPStore takes the port over while the promise is held."""
    from torch._C._distributed_c10d import TCPStore

    with ports.reserve() as promised:
        port = promised.getsockname()[1]
        store = TCPStore(host, port, 1, is_master=True, use_libuv=libuv)
        store.set("key", "value")
        other = TCPStore(host, port, is_master=False, use_libuv=libuv)
        assert other.get("key") == b"value"
        del other, store


def test_a_taken_port_is_refused_with_its_number() -> None:
    """B044: the number is in the message."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is not free"):
            ports.reserve(port)


def test_listening_needs_an_address_of_this_machine() -> None:
    """The answer is None for a host that is not this one, and an error for one that nobody knows."""
    assert ports.listen("192.0.2.7", 29400) is None
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid cannot be resolved"):
        ports.listen("no-such-host.invalid", 29400)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listening_at_loopback_is_not_open_to_the_network(host: str) -> None:
    """A loopback endpoint listens on loopback only; a second listener finds the port taken."""
    server = ports.listen(host, 0)
    assert server is not None
    with server:
        address, port = server.getsockname()[:2]
        assert address in {"127.0.0.1", "::1"}
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is checked
            ports.listen(host, port)
        assert caught.value.errno == errno.EADDRINUSE


def test_the_text_above_is_a_program() -> None:
    """The program for the namespace compiles, so its skip hides nothing."""
    compile(textwrap.dedent(EXHAUST), "exhaust", "exec")
