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
        raise WorldError(
            f"device {requested!r} is none of auto, cpu, cuda", do="the index follows from the local rank"
        )
    listed = entries(environ.get(VISIBLE))
    if requested == "cpu" or (requested != "cuda" and listed == []):
        return torch.device("cpu")
    own = own_list(world.launcher, environ)
    index = choose(world.local_rank, world.local_size, torch.cuda.device_count(), own=own)
    if index is None:
        if requested == "cuda":
            raise _no_cuda(environ)
        return torch.device("cpu")
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


def _no_cuda(environ: Mapping[str, str]) -> WorldError:
    seen = environ.get(VISIBLE)
    return WorldError(
        "device cuda was asked for, but this process sees no CUDA device",
        found=f"{VISIBLE} {'unset' if seen is None else f'={seen!r}'}, torch {torch.__version__}",
        do="ask the scheduler for GPUs, install a CUDA build of torch, or choose device cpu",
    )
