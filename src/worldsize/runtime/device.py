"""Room: the device of this rank. Knows torch.cuda; never initialises CUDA where the CPU was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worldsize.errors import WorldError
from worldsize.runtime.visible import VISIBLE, choose, entries, mig_note, own_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worldsize.world import World


def choose_device(world: World, requested: str | None, environ: Mapping[str, str]) -> torch.device:
    """The device of this rank, made the current one where it is a CUDA device.

    Args:
        world: who this rank is on its node.
        requested: "cpu", "cuda", or "auto" (also None): CUDA where a device is visible, else the CPU.
        environ: the environment, for what was made visible to whom.

    Raises:
        WorldError: fewer devices than ranks, CUDA asked for where none is visible, or an unknown request.
    """
    if requested not in (None, "auto", "cpu", "cuda"):
        raise WorldError(f"device {requested!r} is none of auto, cpu, cuda", do="leave the index to the local rank")
    if requested == "cpu":
        return torch.device("cpu")
    index = choose(world.local_rank, world.local_size, _count(environ), own=own_list(world.launcher, environ))
    if index is None:
        return _no_device(requested, environ)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device, environ: Mapping[str, str] | None = None) -> str:
    """One line that names the physical device: model, memory in GiB, UUID; for the CPU its number of threads."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    facts = torch.cuda.get_device_properties(device)
    note = mig_note(entries((environ or {}).get(VISIBLE)))
    memory = facts.total_memory / 2**30
    return f"{device} = {facts.name}, {memory:.0f} GiB, {identity(device)}{f' ({note})' if note else ''}"


def identity(device: torch.device) -> str | None:
    """What tells a physical CUDA device from every other one: two ranks must not have the same. None for a CPU."""
    if device.type == "cpu":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _count(environ: Mapping[str, str]) -> int:
    listed = entries(environ.get(VISIBLE))
    count = 0 if listed == [] else torch.cuda.device_count()
    if listed and not count and torch.backends.cuda.is_built():
        raise WorldError(
            f"{VISIBLE} lists {len(listed)} device(s), but the driver shows none",
            found=f"{VISIBLE}={environ[VISIBLE]}",
            do="list devices that exist (nvidia-smi -L), or choose device cpu",
        )
    return count


def _no_device(requested: str | None, environ: Mapping[str, str]) -> torch.device:
    if requested != "cuda":
        return torch.device("cpu")
    listed = environ.get(VISIBLE)
    raise WorldError(
        "device cuda was asked for, but this process sees no CUDA device",
        found=f"{VISIBLE} {'unset' if listed is None else f'is {listed!r}'}, torch {torch.__version__}",
        do="ask the scheduler for GPUs, install a CUDA build of torch, or choose device cpu",
    )
