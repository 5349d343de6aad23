"""How ranks reach each other: endpoints, own address, listeners."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import WorldError
from worldsize.runtime.network import (
    addresses,
    check_master,
    check_own_address,
    is_loopback,
    join_endpoint,
    no_answer,
    reachable,
    split_endpoint,
)
from worldsize.world import World

TWO_NODES = World(2, 4, 0, 2, 1, 2, "slurm", "node1", 15000)
ONE_NODE = World(1, 2, 1, 2, 0, 1, "slurm", "127.0.0.1", 15000)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node1:29400", "node1", 29400),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:29400", "::1", 29400),
        ("[fd00::2]", "fd00::2", 29500),
        ("node1", "node1", 29500),
        ("node1.site.org:65535", "node1.site.org", 65535),
    ],
)
def test_an_endpoint_is_host_and_port(text: str, host: str, port: int) -> None:
    """Names, IPv4 and bracketed IPv6, with a default where no port is written."""
    assert split_endpoint(text, 29500) == (host, port)


@pytest.mark.parametrize("text", ["", ":29400", "node1:", "node1:x", "node1:0", "node1:65536", "node1:²", "a b:80"])
def test_what_has_no_host_or_port_is_refused_and_quoted(text: str) -> None:
    """A slip in an endpoint is an error that quotes it."""
    with pytest.raises(WorldError) as refusal:
        split_endpoint(text, 29500)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["::1", "::1:29400", "[::1", "[::1]29400", "[node1]:29400", "[]:1", "node1:1:2", "http://node1:80"]
)
def test_what_is_no_endpoint_is_refused_and_quoted(text: str) -> None:
    """An IPv6 address without brackets could be read two ways: refused like every other slip."""
    with pytest.raises(WorldError) as refusal:
        split_endpoint(text, 29500)
    assert repr(text) in str(refusal.value)


def test_a_port_must_come_from_somewhere() -> None:
    """Without a default the port must be written."""
    with pytest.raises(WorldError, match="host:port"):
        split_endpoint("node1")


@given(st.ip_addresses(), st.integers(1, 65535))
def test_any_address_comes_back_from_its_endpoint(address: object, port: int) -> None:
    """Splitting undoes joining, for any IPv4 and IPv6 address and port."""
    assert split_endpoint(join_endpoint(str(address), port)) == (str(address), port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "[::1]", "LocalHost", "ip6-localhost"])
def test_loopback_is_told_without_resolving(host: str) -> None:
    """The whole 127 network, ::1 and the usual names."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["node1", "10.0.0.1", "fd00::1", "localhost.site.org", "127"])
def test_other_hosts_are_no_loopback(host: str) -> None:
    """A name is no loopback for looking like one."""
    assert not is_loopback(host)


def test_one_node_keeps_loopback() -> None:
    """B046: with one node nothing is exported, whatever the name resolves to."""
    assert check_own_address(ONE_NODE, {}, hostname="node1", resolve=lambda _: ["127.0.1.1"]) is None


def test_a_name_with_a_real_address_needs_nothing() -> None:
    """B046: gloo will advertise an address that the peers can reach."""
    assert check_own_address(TWO_NODES, {}, hostname="node2", resolve=lambda _: ["127.0.1.1", "10.0.0.2"]) is None


def test_the_users_interface_is_never_replaced() -> None:
    """B046: GLOO_SOCKET_IFNAME set by the user stays, even where the name resolves to loopback."""
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert check_own_address(TWO_NODES, environ, hostname="node2", resolve=lambda _: ["127.0.1.1"]) is None


IN_A_NAMESPACE = """
from worldsize.errors import WorldError
from worldsize.runtime.network import check_own_address
from worldsize.world import World
names = {"node2": ["127.0.1.1"], "far": ["10.8.0.9"], "near": ["10.9.0.9"], "six": ["fd09::9"], "me": ["127.0.1.1"]}
for master in ("near", "far", "six", "me", "unknown"):
    world = World(2, 4, 0, 2, 1, 2, "slurm", master, 15000)
    try:
        print(master, check_own_address(world, {}, hostname="node2", resolve=lambda name: names.get(name, [])))
    except WorldError as error:
        print(master, "refused", "eth8, eth9" in str(error), "GLOO_SOCKET_IFNAME" in str(error))
"""
INTERFACES = """
ip link set lo up
for number in 8 9; do
    ip link add eth$number type veth peer name peer$number
    ip addr add 10.$number.0.1/24 dev eth$number
    ip link set eth$number up && ip link set peer$number up
done
ip -6 addr add fd09::1/64 dev eth9 nodad
"""


def in_a_namespace(setup: str) -> dict[str, str]:
    """What `check_own_address` answers for each master, in a network namespace made by these commands."""
    command = ["unshare", "--net", "sh", "-ec", f'{setup}\nexec "$0" -c "$1"', sys.executable, IN_A_NAMESPACE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


@pytest.mark.netns
def test_the_interface_that_routes_to_rank_0_is_taken() -> None:
    """B046: of two real interfaces the one with the route; where none leads anywhere, an error that names both."""
    answers = in_a_namespace(INTERFACES)
    assert (answers["near"], answers["far"], answers["six"]) == ("eth9", "eth8", "eth9")
    assert answers["me"] == answers["unknown"] == "refused True True"


@pytest.mark.netns
def test_on_rank_0s_own_host_the_default_route_decides() -> None:
    """B046: MASTER_ADDR resolves to loopback on that very host: the interface that leads outside is taken."""
    answers = in_a_namespace(f"{INTERFACES}\nip route add default via 10.8.0.254")
    assert answers["me"] == "eth8"


def test_a_name_that_does_not_resolve_is_told_at_once() -> None:
    """MASTER_ADDR of a host that nobody knows is an error that names it, before any waiting."""
    with pytest.raises(WorldError, match=r"MASTER_ADDR=node1 cannot be resolved"):
        check_master(TWO_NODES, resolve=lambda _: [])
    check_master(TWO_NODES, resolve=lambda _: ["10.0.0.1"])
    check_master(World())


def test_the_system_resolves_addresses_and_knows_no_invalid_name() -> None:
    """Numbers resolve to themselves; the reserved name "invalid" to nothing."""
    assert (addresses("127.0.0.1"), addresses("::1"), addresses("nobody.invalid")) == (["127.0.0.1"], ["::1"], [])


def test_a_listener_is_reachable() -> None:
    """Somebody who listens is found at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reachable("127.0.0.1", server.getsockname()[1], timeout=5)


def test_a_listener_that_comes_late_is_reachable() -> None:
    """Rank 0 may start later than the others: refusal is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def listen() -> None:
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", port)) as late:
            late.settimeout(5)
            late.accept()[0].close()

    thread = threading.Thread(target=listen)
    thread.start()
    assert reachable("127.0.0.1", port, timeout=5)
    thread.join()


def test_nobody_is_not_reachable_and_the_time_is_kept() -> None:
    """Where nobody listens, the answer comes when the time is over, not before and not much later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    assert not reachable("127.0.0.1", port, timeout=0.5)
    assert 0.3 < time.monotonic() - start < 2


def test_no_answer_names_endpoint_listener_and_time() -> None:
    """B047: the endpoint, who should have listened, this rank and node, and how long it waited."""
    world = World(2, 4, 0, 2, 1, 2, "worldsize", "fd00::1", 29400)
    text = str(no_answer(world, 12.3, "connection refused"))
    for part in (
        "[fd00::1]:29400",
        "12 s",
        "rank 0 on the first node",
        "rank 2 on node 1 of 2",
        "connection refused",
    ):
        assert part in text
    assert "rank 0 (this process)" in str(no_answer(World(0, 4, 0, 2, 0, 2, "slurm", "a", 1), 1))
