"""Ranks and nodes that are lost and join: the run goes on with them, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.launch.commands import RUN, clean

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(900), pytest.mark.waits]

STEPS, REST = 200, 0.2
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("changing.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
Row = dict[str, Any]


class World:
    """A training in a folder of its own, and the commands that make its world."""

    def __init__(self, folder: Path, endpoint: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.endpoint, self.commands = folder, endpoint, list[subprocess.Popen[str]]()

    def start(self, *words: str, steps: int = STEPS, rest: float = REST) -> subprocess.Popen[str]:
        """One command more."""
        env = {"WORLDSIZE_LEDGER": str(self.folder / "ledger"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        argv = [*words, str(PROGRAM), str(self.folder), str(steps), str(rest)]
        with (self.folder / f"errors-{len(self.commands)}").open("w") as errors:
            command = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**clean(), **env},
                text=True,
            )
        self.commands.append(command)
        return command

    def node(self, *words: str, nodes: str = "1:3", call: str = "500ms", **settings: Any) -> subprocess.Popen[str]:
        """`worldsize run` on one more machine."""
        own = ("--nnodes", nodes, "--rdzv-endpoint", self.endpoint, "--last-call", call, "--device", "cpu")
        return self.start(*RUN, *own, *words, **settings)

    def agent(self, *words: str, nodes: str = "1:3") -> subprocess.Popen[str]:
        """`torchrun` on one more machine; the first is that of the endpoint.

        With the agents' store shared, torch 2.13 does not tell a node that joins where rank 0 is: see docs/elastic.md.
        """
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "7")
        conf = f"last_call_timeout=2,is_host={int(not self.commands)}"
        return self.start(*TORCHRUN, "--nnodes", nodes, *meet, "--rdzv-conf", conf, *words)

    @property
    def said(self) -> list[Row]:
        """What the ranks said of their steps."""
        file = self.folder / "said"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def hurry(self) -> None:
        """Nothing else is to happen."""
        (self.folder / "hurry").touch()

    def until(self, world: int, steps: int = 3) -> None:
        """Wait until a world of this size has made so many steps more."""
        before = len(self.said)
        end = time.monotonic() + 300
        while sum(row["world"] == world for row in self.said[before:]) < steps * world:
            assert time.monotonic() < end, "".join(map(self.errors, self.commands))
            time.sleep(0.05)

    def kill(self, world: int, rank: int) -> None:
        """SIGKILL to a rank of this world."""
        pid = next(row["pid"] for row in reversed(self.said) if (row["rank"], row["world"]) == (rank, world))
        os.kill(pid, signal.SIGKILL)

    def errors(self, command: subprocess.Popen[str]) -> str:
        """What a command has said so far."""
        return (self.folder / f"errors-{self.commands.index(command)}").read_text(errors="replace")

    def ended(self, command: subprocess.Popen[str]) -> str:
        """It ended well; what it said."""
        assert command.wait(300) == 0, self.errors(command)
        return self.errors(command)

    @staticmethod
    def lose(command: subprocess.Popen[str]) -> None:
        """SIGKILL to a command and to all that it started: the machine is gone."""
        for process in (psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)):
            process.kill()

    def losses(self) -> dict[int, float]:
        """By step. Whatever was made again had the same, on every rank, up to rounding."""
        found: dict[int, float] = {}
        for row in self.said:
            loss = found.setdefault(row["step"], row["loss"])
            assert abs(row["loss"] - loss) <= 1e-10 * abs(loss), row
        return dict(sorted(found.items()))

    def samples(self) -> dict[int, list[int]]:
        """Of each step as its last attempt made it, in the order of the ranks."""
        files = sorted((self.folder / "ledger").iterdir())
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        last: dict[int, int] = {}
        for row in rows:
            last[row["step"]] = max(row["attempt"], last.get(row["step"], 0))
        found: dict[int, list[int]] = {}
        for row in rows:
            if row["attempt"] == last[row["step"]]:
                found.setdefault(row["step"], []).extend(row["ids"])
        return dict(sorted(found.items()))

    def sizes(self) -> list[int]:
        """The sizes of its worlds, one after another."""
        sizes = [row["world"] for row in self.said]
        return [size for at, size in enumerate(sizes) if at == 0 or size != sizes[at - 1]]

    def close(self) -> None:
        """End what still runs."""
        for command in self.commands:
            command.kill()
            command.wait()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One that is to be disturbed."""
    from tests.launch.test_rendezvous import endpoint

    made = World(tmp_path / "world", endpoint())
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same training in one process."""
    alone = World(tmp_path_factory.mktemp("alone"))
    alone.ended(alone.start(sys.executable, rest=0))
    assert len(alone.losses()) == STEPS
    return alone


def as_if_nothing_had_happened(undisturbed: World, found: World) -> None:
    """The samples of every step exactly, the losses to 1e-10."""
    assert found.samples() == undisturbed.samples()
    expected, losses = undisturbed.losses(), found.losses()
    assert losses.keys() == expected.keys()
    for step, loss in expected.items():
        assert abs(losses[step] - loss) <= 1e-10 * abs(loss), step


def test_a_rank_is_killed_twice_and_a_rank_joins(world: World, undisturbed: World) -> None:
    """Three ranks, one SIGKILLed twice, then a fourth comes: the samples and losses of an undisturbed run."""
    first = world.node("-n", "3")
    for _ in range(2):
        world.until(3)
        world.kill(3, 1)
    world.until(3)
    joined = world.node("-n", "1")
    world.until(4)
    world.hurry()
    said = world.ended(first)
    assert said.count("rank 1 of 3") == 2
    assert said.count("starting again with 3 ranks on 1 node from step ") == 2
    assert "joined: going on with 4 ranks on 2 nodes from step " in said
    assert "the running world is asked to let it in" in world.ended(joined)
    assert world.sizes() == [3, 4]
    as_if_nothing_had_happened(undisturbed, world)


def test_a_node_is_lost_and_comes_back(world: World, undisturbed: World) -> None:
    """Its supervisor is killed with its rank: two go on, and three when it is there again."""
    first, second, third = (world.node("-n", "1", "--node-rank", str(node)) for node in range(3))
    world.until(3)
    third.kill()
    world.until(2)
    again = world.node("-n", "1")
    world.until(3)
    world.hurry()
    said = world.ended(first) + world.ended(second) + world.ended(again)
    assert " of 3 on " in said
    assert "is lost" in said
    assert "(starting again with 2 ranks on 2 nodes from step " in said
    assert "joined: going on with 3 ranks on 3 nodes from step " in said
    assert world.sizes() == [3, 2, 3]
    as_if_nothing_had_happened(undisturbed, world)


@pytest.mark.matrix
def test_node_0_is_lost_and_comes_back(world: World, undisturbed: World) -> None:
    """Another takes its place; when it is started again at the old endpoint, it is led to the new one."""
    first, *others = (world.node("-n", "1", "--node-rank", str(node), call="3s") for node in range(3))
    world.until(3)
    first.kill()
    world.until(2)
    again = world.node("-n", "1", call="3s")
    world.until(3)
    world.hurry()
    assert "another node took node 0's place meanwhile" in world.ended(again)
    said = "".join(world.ended(other) for other in others)
    assert "is lost" in said
    assert "this node takes node 0's place; who joins from now on is to give --rdzv-endpoint 127.0.0.1:" in said
    assert world.sizes() == [3, 2, 3]
    as_if_nothing_had_happened(undisturbed, world)


@pytest.mark.matrix
def test_more_ranks_than_micro_batches_wait(world: World, undisturbed: World) -> None:
    """A fifth rank for four micro-batches: it is refused with the numbers, waits, and comes in when another is lost."""
    first, second = (world.node("-n", "2", "--node-rank", str(node)) for node in range(2))
    world.until(4)
    fifth = world.node("-n", "1")
    world.until(4, 5)
    second.kill()
    world.until(3)
    world.hurry()
    said = world.ended(first)
    assert "5 ranks, global_batch 16 = 4 micro-batches of 4" in said
    assert "(starting again with 4 ranks on 2 nodes from step " in said
    assert "(starting again with 3 ranks on 2 nodes from step " in said
    assert "a world of 5 ranks was refused" in world.ended(fifth)
    assert world.sizes() == [4, 3]
    as_if_nothing_had_happened(undisturbed, world)


@pytest.mark.matrix
def test_under_torchrun_an_agent_is_killed_and_another_joins(world: World, undisturbed: World) -> None:
    """Its own elastic agents start all ranks again: 2, 1 and 2 ranks."""
    first, second = (world.agent("--max-restarts", "5") for _ in range(2))
    world.until(2)
    world.lose(second)
    world.until(1)
    again = world.agent("--max-restarts", "5")
    world.until(2)
    world.hurry()
    for command in (first, again):
        world.ended(command)
    assert world.sizes() == [2, 1, 2]
    as_if_nothing_had_happened(undisturbed, world)
