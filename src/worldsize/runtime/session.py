"""Room: this process among the others, opened once: world, device, process groups; and closed on every way out."""

from __future__ import annotations

import atexit
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from worldsize.errors import WorldError
from worldsize.runtime import board, env, farewell, keyvalue, network, signals
from worldsize.runtime.comm import Alone, Comm, Ranks
from worldsize.runtime.device import choose_device, identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worldsize.world import World

_MEETING = timedelta(minutes=5)
"""How long ranks wait for each other at the start, at least: imports on a slow shared file system take minutes."""

_open: Session | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """What every room above is given: who we are, where we compute, how we agree."""

    world: World
    device: torch.device
    comm: Comm
    timeout: timedelta

    def need_group(self) -> None:
        """Make torch's default process group exist, also in a world of one, for wrappers that insist on it."""
        if not dist.is_initialized():
            dist.init_process_group(_backend(self.device), store=HashStore(), rank=0, world_size=1)


def session(device: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> Session:
    """The session of this process: opened by the first call, the same one afterwards.

    Args:
        device: "cpu", "cuda", or None for CUDA where there is one.
        timeout: how long a collective may take before it is an error.

    Raises:
        WorldError: the environment is partial or contradicts itself, or a later call asks for another device.
    """
    global _open  # noqa: PLW0603 - a process has one default process group
    if _open is None:
        _open = _start(device, timeout)
    elif device not in (None, "auto", _open.device.type):
        raise WorldError("this process already trains on another device", found=f"{_open.device}, asked for {device}")
    return _open


def close() -> None:
    """Give the process groups back. Runs at exit; safe to call twice."""
    global _open  # noqa: PLW0603
    _open = None
    farewell.dismiss()


def _start(device: str | None, timeout: timedelta) -> Session:
    environ = env.read()
    world = env.detect(environ)
    chosen = choose_device(world, device, environ)
    signals.install()
    with signals.leaving():
        world, store = (world, None) if world.alone or world.master_port else _listen(world, environ)
        comm: Comm = Alone() if world.alone else _join(world, chosen, timeout, store)
    atexit.register(_leave)
    return Session(world, chosen, comm, timeout)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _listen(world: World, environ: Mapping[str, str]) -> tuple[World, Store | None]:
    """The world with rank 0's endpoint, and there the store itself, where the launcher left that to the ranks."""
    made: list[Store] = []

    def listen(address: str) -> int:
        store = TCPStore(address, 0, world.size, is_master=True, timeout=_MEETING, wait_for_workers=False)
        made.append(store)
        return int(store.port)

    return keyvalue.meet(world, environ, listen, _MEETING.total_seconds()), made[0] if made else None


def _join(world: World, device: torch.device, timeout: timedelta, store: Store | None) -> Comm:
    if not dist.is_initialized():
        network.check_master(world)
        interface = network.check_own_address(world, env.read())
        env.export({"GLOO_SOCKET_IFNAME": interface} if interface else {})
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        store = _meet(world, max(timeout, _MEETING), store)
        store.set_timeout(timeout)
        dist.init_process_group(
            _backend(device), store=store, rank=world.rank, world_size=world.size, timeout=timeout, **options
        )
    comm = Ranks(dist.new_group(backend="gloo", timeout=timeout), timeout)
    _same_world(comm, world, device)
    comm.board = board.shared(comm, timeout) if world.nodes == 1 else None
    return comm


def _attempt(world: World, environ: Mapping[str, str]) -> str:
    """What names of this attempt begin with. Each has a store of its own, unless torchrun's agents share theirs.

    An agent that joins has counted no restart yet: the count must not part ranks that need no name to be told apart.
    """
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"worldsize/{world.restart if shared else 0}"


def _meet(world: World, limit: timedelta, store: Store | None) -> Store:
    """Reach rank 0's store and see every rank there: a missing one is named, not waited for in a collective."""
    began = time.monotonic()
    address = network.join_endpoint(str(world.master_addr), int(world.master_port or 0))
    try:
        store = store or next(rendezvous(f"tcp://{address}", world.rank, world.size, timeout=limit))[0]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise network.no_answer(world, time.monotonic() - began, str(error).splitlines()[0]) from None
    attempt = _attempt(world, env.read())
    start = f"{attempt}/here"
    store.set(f"{start}/{world.rank}", socket.gethostname())
    try:
        store.wait([f"{start}/{rank}" for rank in range(world.size)], limit)
    except dist.DistStoreError:
        missing = [rank for rank in range(world.size) if not store.check([f"{start}/{rank}"])]
        raise network.no_answer(world, time.monotonic() - began, f"ranks {missing} did not come") from None
    return PrefixStore(attempt, store)


def _same_world(comm: Comm, world: World, device: torch.device) -> None:
    """Every rank must believe in the same world: two launchers mixed in one job show here, not as a hang.

    No two ranks may have one physical device: they would share its memory and its time, and nobody would say so.
    """
    host = socket.gethostname()
    seen = comm.gather((world.size, world.nodes, world.launcher, device.type, (world.node, host), identity(device)))
    if len({facts[:4] for facts in seen}) > 1:
        raise WorldError(
            "ranks disagree about the world",
            found=str([facts[:4] for facts in seen]),
            do="start all ranks by one launcher, on devices of one kind",
        )
    places = {facts[4] for facts in seen}
    if world.nodes > 1 and len({node for node, _ in places}) != len(places):
        raise WorldError("one node number stands for several hosts", found=str(sorted(places)), do="number the nodes")
    devices = [(facts[4][1], facts[5]) for facts in seen]
    shared = [rank for rank, each in enumerate(devices) if each[1] is not None and devices.count(each) > 1]
    if shared:
        raise WorldError(
            "ranks share a device",
            found=f"ranks {shared}: {devices[shared[0]]}",
            do="give each rank a device of its own",
        )


def _leave() -> None:
    # After a failure the peers may sit in a collective for ever: leaving without a farewell frees them sooner.
    if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
        close()
    else:
        farewell.settle()
