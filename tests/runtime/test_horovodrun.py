"""What horovodrun says of the world, and how its ranks learn where to meet."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from worldsize.errors import WorldError
from worldsize.runtime import env, keyvalue
from worldsize.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

STORE = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}


def said(rank: int, size: int, local: tuple[int, int], cross: tuple[int, int], **more: str) -> dict[str, str]:
    """What horovodrun sets for a rank: (which of how many) in all, on its host, and of its like on all hosts."""
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local[0], "LOCAL_SIZE": local[1]}
    numbers |= {"CROSS_RANK": cross[0], "CROSS_SIZE": cross[1]}
    return {**{f"HOROVOD_{name}": str(value) for name, value in numbers.items()}, **STORE, **more}


def test_two_hosts_of_two_ranks() -> None:
    """Rank 3 is the second of the second host; where rank 0 listens is not known yet."""
    world = env.detect(said(3, 4, (1, 2), (1, 2)))
    assert world == World(3, 4, 1, 2, 1, 2, launcher="horovodrun")


def test_one_host_of_three_ranks() -> None:
    """Its ranks have no counterparts elsewhere."""
    assert env.detect(said(2, 3, (2, 3), (0, 1))) == World(2, 3, 2, 3, 0, 1, launcher="horovodrun")


def test_an_address_and_port_of_the_user_are_taken() -> None:
    """Both of them; horovodrun hands them on."""
    world = env.detect(said(1, 2, (1, 2), (0, 1), MASTER_ADDR="10.0.0.7", MASTER_PORT="2345"))
    assert (world.master_addr, world.master_port) == ("10.0.0.7", 2345)


def test_it_is_nearer_than_the_slurm_task_it_runs_in() -> None:
    """One task of a step of two nodes starts all ranks."""
    task = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert env.detect(task | said(1, 2, (1, 2), (0, 1))).rank == 1


def test_hosts_of_different_sizes_are_refused_by_a_rank_at_least() -> None:
    """Ranks 0 and 1 on one host and 2 on another: the first host's number cannot be told from rank 1's variables."""
    with pytest.raises(WorldError, match="do not fit on these nodes"):
        env.detect(said(1, 3, (1, 2), (0, 1)))


@pytest.mark.parametrize("missing", ["SIZE", "LOCAL_SIZE", "CROSS_SIZE", "GLOO_RENDEZVOUS_PORT"])
def test_a_description_in_part_is_refused(missing: str) -> None:
    """Elastic starts leave things out."""
    environ = said(0, 2, (0, 2), (0, 1))
    del environ[f"HOROVOD_{missing}"]
    with pytest.raises(WorldError, match=f"HOROVOD_{missing} is not set"):
        env.detect(environ)


def test_a_rank_handed_on_from_outside_is_refused_with_both() -> None:
    """`RANK=0` in the shell of horovodrun is 0 in all of its ranks."""
    contract = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(WorldError, match="RANK=0, HOROVOD_RANK=1, WORLD_SIZE=2, HOROVOD_SIZE=2"):
        env.detect(contract | said(1, 2, (1, 2), (0, 1)))


def test_variables_are_lent_and_given_back() -> None:
    """What was there is there again, and what was not is gone."""
    env.export({"WORLDSIZE_TEST_OLD": "before"})
    with env.lent({"WORLDSIZE_TEST_OLD": "now", "WORLDSIZE_TEST_NEW": "now"}):
        assert [env.read().get(f"WORLDSIZE_TEST_{name}") for name in ("OLD", "NEW")] == ["now", "now"]
    assert [env.read().get(f"WORLDSIZE_TEST_{name}") for name in ("OLD", "NEW")] == ["before", None]


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """Horovodrun's own server, and the variables that name it."""
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    yield STORE | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.start())}
    server.stop()
    server._httpd.server_close()


def _world(rank: int) -> World:
    return World(rank, 2, rank, 2, launcher="horovodrun")


@pytest.mark.horovod
def test_a_rank_waits_for_what_rank_0_says(store: dict[str, str]) -> None:
    """In Horovod's own store: the address is rank 0's host, the port the one it has bound."""
    with ThreadPoolExecutor() as threads:
        second = threads.submit(keyvalue.meet, _world(1), store, lambda _: 0, 20)
        first = keyvalue.meet(_world(0), store, lambda _: 5432, 20)
        assert second.result().master_port == first.master_port == 5432
        assert second.result().master_addr == first.master_addr == "127.0.0.1"


@pytest.mark.horovod
def test_a_rank_0_that_does_not_come_is_named(store: dict[str, str]) -> None:
    """After the time it was given."""
    with pytest.raises(WorldError, match="rank 0 did not come within 0 s"):
        keyvalue.meet(_world(1), store, lambda _: 0, 0)


def test_a_store_that_is_gone_is_named() -> None:
    """With its address and port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
        with pytest.raises(WorldError, match=f"Connection refused.*HOROVOD_GLOO_RENDEZVOUS_PORT={port}"):
            keyvalue.meet(_world(1), STORE | {"HOROVOD_GLOO_RENDEZVOUS_PORT": port}, lambda _: 0, 0)
