"""Nodes and slots that come and go, by the real command, with programs that load no torch."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING

from tests.launch.commands import finish, lines, run, script, start, until
from tests.launch.test_rendezvous import endpoint
from worldsize.launch.guest import Guest
from worldsize.launch.loop import Loop
from worldsize.launch.plan import Plan, Share
from worldsize.launch.verdict import Report, Verdict

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

COMMITS = """
import worldsize.runtime.report as report
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.makedirs(sys.argv[1], exist_ok=True)
done = sys.argv[1] + "/commits"
step = len(open(done).readlines()) if os.path.exists(done) else 0
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
here = sys.argv[1] + "/here-" + os.environ["MASTER_PORT"]
for path in (here, sys.argv[1] + "/worlds"):
    with open(path, "a") as file:
        file.write(f"{world} {rank} {os.getpid()}\\n")
while len(open(here).readlines()) < world and not asked: time.sleep(0.01)  # nobody commits alone
while not os.path.exists(sys.argv[1] + "/end") and not asked:
    if rank == 0:
        step += 1
        open(done, "a").write("x\\n")
        report.committed("here", step)
    time.sleep(0.05)
sys.exit(75 if asked else 0)
"""


class Nodes:
    """Supervisors of one world on this machine."""

    def __init__(self, folder: Path, text: str = COMMITS, nodes: str = "1:3") -> None:
        self.path, self.folder, self.where, self.nodes = script(folder, text), folder / "state", endpoint(), nodes

    def start(self, *words: str, call: str = "300ms") -> subprocess.Popen[str]:
        """One more."""
        own = ("--nnodes", self.nodes, "--rdzv-endpoint", self.where, "--last-call", call)
        return start(*own, *words, self.path, self.folder)

    def until(self, world: int, times: int = 1) -> None:
        """Wait until so many worlds of this size have begun."""
        until(lambda: [int(line.split()[0]) for line in self.worlds].count(world) >= world * times, 120)

    @property
    def worlds(self) -> list[str]:
        """A line a rank: world, rank, process."""
        return lines(self.folder / "worlds")

    def end(self) -> None:
        """Let the program end."""
        (self.folder / "end").touch()


def test_below_the_least_it_waits_and_then_fails(tmp_path: Path) -> None:
    """Two of at least two, and one is lost: the other says that it waits, for how long, and how it ended."""
    nodes = Nodes(tmp_path, nodes="2:3")
    first, second = (nodes.start("--node-rank", str(node), "--rdzv-timeout", "15s") for node in (0, 1))
    nodes.until(2)
    second.kill()
    ended = finish(first)
    assert ended.code == 1
    assert "1 node of at least 2 left: waits up to 15 s at" in ended.err
    assert "only 1 node of at least 2 at" in ended.err.splitlines()[-1]


def test_who_is_too_many_waits_and_ends_with_the_others(tmp_path: Path) -> None:
    """A third of at most two: told so; code 0 at the end; the two never stopped for it."""
    nodes = Nodes(tmp_path, nodes="1:2")
    first, second = nodes.start(), nodes.start()
    nodes.until(2)
    third = nodes.start()
    assert third.stderr is not None
    assert "2 nodes of at most 2 are at work; it comes in when one is lost" in third.stderr.readline()
    nodes.end()
    assert [finish(command).code for command in (first, second, third)] == [0, 0, 0]
    assert len([line for line in nodes.worlds if line.startswith("2 ")]) == 2


def test_a_node_that_comes_and_cannot_work_is_left_out(tmp_path: Path) -> None:
    """Its rank fails at once (something is not installed there): the others go on as before."""
    nodes = Nodes(tmp_path, COMMITS.replace("asked = []", "asked = []\nif 'BAD' in os.environ: import not_there"))
    first = nodes.start()
    nodes.until(1)
    bad = start("--nnodes", nodes.nodes, "--rdzv-endpoint", nodes.where, "--last-call", "300ms", nodes.path,
                nodes.folder, env={"BAD": "1"})  # fmt: skip
    nodes.until(1, 2)
    before = len(lines(nodes.folder / "commits"))
    until(lambda: len(lines(nodes.folder / "commits")) > before)
    nodes.end()
    ended, left_out = finish(first), finish(bad)
    assert (ended.code, left_out.code) == (0, 0)
    assert "ModuleNotFoundError" in ended.err
    assert "(starting again with 1 rank on 1 node from step " in ended.err
    assert "its rank 1 failed before anything was committed: ModuleNotFoundError" in left_out.err


def test_a_stop_by_a_person_is_a_stop(tmp_path: Path) -> None:
    """SIGTERM to one supervisor ends all of them with 75."""
    nodes = Nodes(tmp_path)
    commands = [nodes.start(), nodes.start()]
    nodes.until(2)
    commands[1].send_signal(signal.SIGTERM)
    assert [finish(command).code for command in commands] == [75, 75]


def test_a_slot_that_fails_again_at_once_is_left_out(tmp_path: Path) -> None:
    """Rank 1 of 3 fails twice without a commit: two ranks go on; a single failure keeps its slot."""
    text = """
    with open(sys.argv[1] + "/" + os.environ["WORLD_SIZE"], "a") as file: file.write("x\\n")
    if os.environ["RANK"] + os.environ["WORLD_SIZE"] == "13": sys.exit(4)
    time.sleep(600 if os.environ["WORLD_SIZE"] == "3" else 0)
    """
    ended = run("-n", "2:3", script(tmp_path, text), tmp_path)
    assert ended.code == 0
    assert ended.err.count("rank 1 of 3 on") == 2
    assert "(starting again without that slot, with 2 ranks, 2 of 3)" in ended.err
    assert len(lines(tmp_path / "2")) == 2


def test_the_gpus_of_the_other_slots_stay_theirs(tmp_path: Path) -> None:
    """With GPU 5 of 4, 5, 6 left out, the two ranks see 4 and 6."""
    text = """
    with open(sys.argv[1] + "/" + os.environ["WORLD_SIZE"], "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    if os.environ["RANK"] + os.environ["WORLD_SIZE"] == "13": sys.exit(4)
    time.sleep(600 if os.environ["WORLD_SIZE"] == "3" else 0)
    """
    path = script(tmp_path, text)
    ended = run("-n", "1:3", "--slot-retries", "0", path, tmp_path, env={"CUDA_VISIBLE_DEVICES": "GPU-4,GPU-5,GPU-6"})
    assert (ended.code, lines(tmp_path / "2")) == (0, ["GPU-4,GPU-6"] * 2)


def test_a_start_that_comes_together_with_the_verdict_is_heard() -> None:
    """One packet with both, and with a failure after them: nothing of the next attempt is lost."""
    loop = Loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        guest = Guest(loop, Plan(("x",), nodes=2, endpoint=("127.0.0.1", port)), lambda _: None)
        first, second = (asdict(Share(n, n, 1, 1, 2, 1, 2, "127.0.0.1", 9, "id")) for n in range(2))
        found = []

        def answer() -> None:
            found.append(server.accept()[0])
            found[0].sendall(_said("start", share=first))

        loop.watch(server.fileno(), answer)
        assert isinstance(guest.begin(), Share)
        node_0 = found[0]
        node_0.sendall(
            _said("verdict", verdict=Verdict(1, again=True).to_json()) + _said("start", share=second) + _said("stop")
        )
        assert guest.settle(Report()).again
        share = guest.begin()
        assert isinstance(share, Share)
        assert share.restarts == 1
        heard: list[str] = []
        guest.watch(_Listener(heard))
        assert heard == ["end"]
        node_0.close()
    guest.close()
    loop.close()


class _Listener:
    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def end(self) -> None:
        self._heard.append("end")

    def signal_elsewhere(self, number: int) -> None:
        self._heard.append(str(number))

    def give_way(self) -> None:
        self._heard.append("give way")


def _said(kind: str, **values: object) -> bytes:
    return json.dumps({"kind": kind, **values}).encode() + b"\n"
