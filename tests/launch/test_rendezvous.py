"""Several machines by hand: they meet, share out ranks, and end together."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import Ended, finish, run, script, start, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TELL = "print(json.dumps({name: os.environ[name] for name in os.environ if name.isupper()}))\n"


def endpoint(host: str = "127.0.0.1") -> str:
    """An endpoint that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{host}:{free.getsockname()[1]}"


def nodes(where: str, path: Path, *args: str, each: tuple[tuple[str, ...], ...] = (), count: int = 2) -> list[Ended]:
    """The command of every node, started on this machine; `each` has further options by node."""
    own = each or tuple(("--node-rank", str(node)) for node in range(count))
    common = ("--nnodes", str(len(own)), "--rdzv-endpoint", where, "--rdzv-timeout", "20s")
    commands = [start(*common, *options, path, *args) for options in own]
    return [finish(command) for command in commands]


def told(ended: list[Ended]) -> dict[int, dict[str, str]]:
    """What TELL said on all nodes, by rank."""
    found = [json.loads(line[line.index("{") :]) for one in ended for line in one.out.splitlines()]
    return {int(one["RANK"]): one for one in found}


def test_uneven_nodes_share_one_world(tmp_path: Path) -> None:
    """Two ranks on node 0, one on node 1, three on node 2: six ranks in the nodes' order, one master, one run id."""
    each = tuple(("--node-rank", str(node), "-n", str(count)) for node, count in enumerate((2, 1, 3)))
    found = told(nodes(endpoint(), script(tmp_path, TELL), each=each))
    places = [(one["GROUP_RANK"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for _, one in sorted(found.items())]
    assert places == [
        ("0", "0", "2"),
        ("0", "1", "2"),
        ("1", "0", "1"),
        ("2", "0", "3"),
        ("2", "1", "3"),
        ("2", "2", "3"),
    ]
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "GROUP_WORLD_SIZE"):
        assert len({one[name] for one in found.values()}) == 1
    assert found[0]["WORLD_SIZE"] == "6"


def test_nodes_without_numbers_are_numbered_by_arrival(tmp_path: Path) -> None:
    """The c10d form without --node-rank: whoever can listen is node 0."""
    found = told(nodes(endpoint("localhost"), script(tmp_path, TELL), each=((), (), ())))
    assert sorted(one["GROUP_RANK"] for one in found.values()) == ["0", "1", "2"]


def test_a_failure_on_node_1_is_said_on_node_0(tmp_path: Path) -> None:
    """Both commands end within seconds, with the same code and the same line, which names the rank."""
    text = "if os.environ['RANK'] == '1': raise ValueError('bad key x')\ntime.sleep(600)"
    ended = nodes(endpoint(), script(tmp_path, text))
    assert [one.code for one in ended] == [1, 1]
    assert sum(one.took for one in ended) < 10
    lines = {one.err.splitlines()[-1] for one in ended}
    assert len(lines) == 1
    assert "rank 1 of 2" in lines.pop()
    assert [one.err.count("Traceback") for one in ended] == [1, 1]


def test_restarts_are_taken_together(tmp_path: Path) -> None:
    """One rank fails once: all nodes start again, with the same count and a new port, and succeed."""
    text = TELL + "if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10': sys.exit(3)\n"
    text += "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(600)"
    each = tuple(("--node-rank", str(node), "--max-restarts", "1") for node in (0, 1))
    ended = nodes(endpoint(), script(tmp_path, text), each=each)
    assert [one.code for one in ended] == [0, 0]
    found = [json.loads(line[line.index("{") :]) for one in ended for line in one.out.splitlines()]
    seconds = [one for one in found if one["TORCHELASTIC_RESTART_COUNT"] == "1"]
    assert [one["RANK"] for one in seconds] == ["0", "1"]
    assert len({one["MASTER_PORT"] for one in seconds}) == 1


def test_a_lost_node_ends_the_others(tmp_path: Path) -> None:
    """SIGKILL of node 1's command: node 0 says which node is lost, and ends within seconds."""
    path = script(tmp_path, "open(sys.argv[1] + '/up' + os.environ['RANK'], 'w').close()\ntime.sleep(600)")
    common = ("--nnodes=2", f"--rdzv-endpoint={endpoint()}", "--max-restarts=3")
    first, second = (start(*common, "--node-rank", str(node), path, tmp_path) for node in (0, 1))
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)))
    second.kill()
    ended = finish(first, 20)
    finish(second)
    assert ended.code == 1
    assert f"node 1 of 2 on {socket.gethostname()} is lost" in ended.err


def test_the_loss_of_node_0_is_noticed(tmp_path: Path) -> None:
    """SIGKILL of node 0's command: node 1 says so, and ends."""
    path = script(tmp_path, "open(sys.argv[1] + '/up' + os.environ['RANK'], 'w').close()\ntime.sleep(600)")
    where = endpoint()
    common = ("--nnodes=2", f"--rdzv-endpoint={where}")
    first, second = (start(*common, "--node-rank", str(node), path, tmp_path) for node in (0, 1))
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)))
    first.kill()
    ended = finish(second, 20)
    finish(first)
    assert ended.code == 1
    assert f"node 0 of 2 at {where} is lost" in ended.err


def test_a_stop_of_one_node_stops_all(tmp_path: Path) -> None:
    """Ctrl-C on node 1: both commands end as stopped, nothing is restarted."""
    path = script(tmp_path, "open(sys.argv[1] + '/up' + os.environ['RANK'], 'w').close()\ntime.sleep(600)")
    common = ("--nnodes=2", f"--rdzv-endpoint={endpoint()}", "--max-restarts=3")
    commands = [start(*common, "--node-rank", str(node), path, tmp_path) for node in (0, 1)]
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)))
    commands[1].send_signal(signal.SIGINT)
    ended = [finish(command, 20) for command in commands]
    assert [(one.code, one.err) for one in ended] == [(130, "worldsize: stopped by SIGINT\n")] * 2


def test_a_stop_that_comes_again_while_others_still_save_changes_nothing(tmp_path: Path) -> None:
    """It reaches node 0 twice: from node 1, and by itself when its own ranks have saved and ended already."""
    text = """
rank, asked = os.environ["RANK"], []
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
open(sys.argv[1] + "/up" + rank, "w").close()
while not asked: time.sleep(0.01)
time.sleep(3 * int(rank))
open(sys.argv[1] + "/saved" + rank, "w").close()
sys.exit(75)
"""
    path, common = script(tmp_path, text), ("--nnodes=2", f"--rdzv-endpoint={endpoint()}")
    commands = [start(*common, "--node-rank", str(node), path, tmp_path) for node in (0, 1)]
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)))
    commands[1].send_signal(signal.SIGINT)
    until((tmp_path / "saved0").exists)
    time.sleep(1)
    commands[0].send_signal(signal.SIGINT)
    assert [finish(command, 20).code for command in commands] == [75, 75]
    assert (tmp_path / "saved1").exists()


def test_a_stop_reaches_ranks_of_other_nodes_when_those_of_node_0_have_ended(tmp_path: Path) -> None:
    """They are not trained on without anybody who could stop them."""
    text = """
rank, asked = os.environ["RANK"], []
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
open(sys.argv[1] + "/up" + rank, "w").close()
while rank != "0" and not asked: time.sleep(0.01)
sys.exit(75 * int(rank))
"""
    path, common = script(tmp_path, text), ("--nnodes=2", f"--rdzv-endpoint={endpoint()}")
    commands = [start(*common, "--node-rank", str(node), path, tmp_path) for node in (0, 1)]
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)))
    time.sleep(1)
    commands[0].send_signal(signal.SIGINT)
    assert [finish(command, 20).code for command in commands] == [75, 75]


def test_node_1_alone_says_whom_it_waited_for(tmp_path: Path) -> None:
    """B047: endpoint, node rank, who was expected to listen, elapsed time; after the timeout that was set."""
    where = endpoint()
    args = ("--nnodes=2", "--node-rank=1", f"--rdzv-endpoint={where}", "--rdzv-timeout=1s")
    ended = run(*args, script(tmp_path, "pass"))
    assert ended.code == 1
    assert 1 <= ended.took < 5
    said = f"node 1 on {socket.gethostname()} waited 1 s at {where} for node 0, which should listen there"
    assert said in ended.err
    assert "Connection refused" in ended.err


def test_node_0_alone_says_who_is_missing(tmp_path: Path) -> None:
    """B047: node 0 names the nodes that did not come."""
    where = endpoint()
    args = ("--nnodes=3", "--node-rank=0", f"--rdzv-endpoint={where}", "--rdzv-timeout=1s")
    ended = run(*args, script(tmp_path, "pass"))
    assert ended.code == 1
    assert f"only 1 of 3 nodes met at {where} within 1 s" in ended.err
    assert "missing node(s) 1, 2" in ended.err


def test_node_0_on_the_wrong_machine_is_told_at_once(tmp_path: Path) -> None:
    """B047: --node-rank 0 where the endpoint is another host's (a rank expanded too early) does not wait."""
    args = ("--nnodes=2", "--node-rank=0", "--rdzv-endpoint=192.0.2.7:29400")
    ended = run(*args, script(tmp_path, "pass"))
    assert ended.code == 1
    assert "192.0.2.7:29400, but that is no address of this machine" in ended.err
    assert ended.took < 5


def test_two_starts_at_one_port_do_not_mix(tmp_path: Path) -> None:
    """B044: a node with another run id is refused with both; the start that is there goes on."""
    where, path = endpoint(), script(tmp_path, TELL)
    common = ("--nnodes=2", f"--rdzv-endpoint={where}")
    first = start(*common, "--rdzv-id=a", "--node-rank=0", path)
    stranger = finish(start(*common, "--rdzv-id=b", "--node-rank=1", path))
    assert stranger.code == 1
    assert "another start listens here: its run id is 'a', not 'b'" in stranger.err
    second = finish(start(*common, "--rdzv-id=a", "--node-rank=1", path))
    assert (finish(first).code, second.code) == (0, 0)


def test_a_node_rank_that_is_taken_is_refused(tmp_path: Path) -> None:
    """B047: two commands with --node-rank 1: the second learns who has it."""
    where, path = endpoint(), script(tmp_path, TELL)
    common = ("--nnodes=3", f"--rdzv-endpoint={where}")
    commands = [start(*common, f"--node-rank={node}", path) for node in (0, 1)]
    until(lambda: _listens(where))
    refused = None
    while refused is None or "is taken" not in refused.err:
        refused = finish(start(*common, "--node-rank=1", "--rdzv-timeout=1s", path))
    assert f"node rank 1 is taken by {socket.gethostname()}" in refused.err
    last = finish(start(*common, "--node-rank=2", path))
    assert [finish(command).code for command in commands] + [last.code] == [0, 0, 0]


def test_strangers_at_the_endpoint_are_dropped(tmp_path: Path) -> None:
    """Whatever a stranger sends, the start goes on without it."""
    where, path = endpoint(), script(tmp_path, TELL)
    common = ("--nnodes=2", f"--rdzv-endpoint={where}")
    first = start(*common, "--node-rank=0", path)
    until(lambda: _listens(where))
    host, port = where.split(":")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": 3}\n',
        b'{"kind": "hello"}\n',
        b"[]\n",
        b"\xff\n",
        b'{"kind":"hello","run_id":""}\n',
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    second = finish(start(*common, "--node-rank=1", path))
    assert (finish(first).code, second.code) == (0, 0)


def test_waiting_for_the_others_can_be_stopped(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM end the wait at the endpoint at once."""
    where = endpoint()
    process = start("--nnodes=2", "--node-rank=0", f"--rdzv-endpoint={where}", script(tmp_path, "pass"))
    until(lambda: _listens(where))
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert (ended.code, ended.took < 5) == (143, True)


def _listens(where: str) -> bool:
    host, port = where.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable, with IPv6 only: fd00::1 and fd00::2."""
    tag = uuid.uuid4().hex[:6]
    names = (f"wsa{tag}", f"wsb{tag}")
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    first, second = (f"v{name[2:]}" for name in names)
    cable = ["ip", "link", "add", first, "netns", names[0], "type", "veth", "peer", "name", second, "netns", names[1]]
    subprocess.run(cable, check=True)
    for number, (name, link) in enumerate(zip(names, (first, second), strict=True), start=1):
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", link, "up"], check=True)
        subprocess.run(["ip", "-n", name, "addr", "add", f"fd00::{number}/64", "dev", link, "nodad"], check=True)
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.netns
def test_two_terminals_two_machines_ipv6(tmp_path: Path, machines: tuple[str, str]) -> None:
    """Seed 004's last form: two commands, an IPv6 endpoint, a real all-reduce over four gloo ranks."""
    text = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    number = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(number)
    print(number.item(), os.environ["MASTER_ADDR"])
    dist.destroy_process_group()
    """
    path = script(tmp_path, text)
    own = (
        "--nproc_per_node=2",
        "--nnodes=2",
        "--rdzv-id=456",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=[fd00::1]:29603",
    )
    commands = [
        start(*own, f"--node-rank={node}", path, inside=("ip", "netns", "exec", machine))
        for node, machine in enumerate(machines)
    ]
    ended = [finish(command, 240) for command in commands]
    assert [one.code for one in ended] == [0, 0], ended
    said = sorted(line for one in ended for line in one.out.splitlines())
    assert said == [f"[rank {rank}] 15.0 fd00::1" for rank in range(4)]
