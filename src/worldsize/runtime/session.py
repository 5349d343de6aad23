"""Room: this process among the others, opened once: world, device, process groups; and closed on every way out."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worldsize.errors import WorldError
from worldsize.runtime import env, network, signals
from worldsize.runtime.comm import Alone, Comm, Ranks
from worldsize.runtime.device import choose_device
from worldsize.world import World

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
            dist.init_process_group(_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)


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
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(device: str | None, timeout: timedelta) -> Session:
    environ = env.read()
    world = env.detect(environ)
    chosen = choose_device(world, device, environ)
    signals.install()
    comm: Comm = Alone() if world.alone else _join(world, chosen, timeout)
    atexit.register(_leave)
    return Session(world, chosen, comm, timeout)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join(world: World, device: torch.device, timeout: timedelta) -> Comm:
    if not dist.is_initialized():
        interface = network.check_own_address(world, env.read())
        env.export({"GLOO_SOCKET_IFNAME": interface} if interface else {})
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        address = network.join_endpoint(str(world.master_addr), int(world.master_port or 0))
        dist.init_process_group(
            _backend(device),
            init_method=f"tcp://{address}",
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            **options,
        )
    comm = Ranks(dist.new_group(backend="gloo", timeout=timeout), timeout)
    _same_world(comm, world)
    return comm


def _same_world(comm: Comm, world: World) -> None:
    """Every rank must believe in the same world: two launchers mixed in one job show here, not as a hang."""
    seen = comm.gather((world.size, world.nodes, world.launcher))
    if len(set(seen)) > 1:
        raise WorldError("ranks disagree about the world", found=str(seen), do="start all ranks by one launcher")


def _leave() -> None:
    # After a failure the peers may sit in a collective for ever: leaving without a farewell frees them sooner.
    if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
        close()
