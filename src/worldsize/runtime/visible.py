"""Room: which devices and CPUs this process may use, by the variables that say so. No torch, no driver.

CUDA_VISIBLE_DEVICES holds opaque names (indices, GPU- and MIG- strings); a process sees its entries as 0, 1, 2, ...
Two situations look alike to one rank and must not be mixed up:

- all ranks of a node share one list: rank i takes entry i, and fewer entries than ranks is a shortage;
- each rank was given its own list (`srun --gpus-per-task`): every rank takes entry 0 of its own.

`own_list` tells them apart. Slurm: the list is shorter than the number of the step's GPUs on this node, which Slurm
states. torchrun and `worldsize run` never set the variable, so there the list is shared. Under MPI or by hand a
wrapper may have set it for each rank: a list of one is taken as the rank's own, and comparing the physical devices
over ranks, once they can talk, finds out if it was not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from worldsize.errors import WorldError
from worldsize.runtime.env import in_slurm_step

if TYPE_CHECKING:
    from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"

_ENTRY = re.compile(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_TYPE = r"[\w.-]*[A-Za-z][\w.-]*"
_GRES = re.compile(
    rf"(?:(?:gres[/:])?gpu(?::{_TYPE})?(?:[:=]([0-9]+))?|{_TYPE}(?::([0-9]+))?|([0-9]+))(?:\([^)]*\))?"
)


def entries(text: str | None) -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES lists, as opaque strings; None where it is unset: all there are.

    As the driver reads it: what follows an invalid entry (-1, "NoDevFiles", nothing) is not visible.

    Raises:
        WorldError: a device is listed twice; the driver would show none at all.
    """
    if text is None:
        return None
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if not _ENTRY.fullmatch(entry):
            break
        if entry in found:
            raise WorldError(f"{VISIBLE} lists {entry} twice", found=f"{VISIBLE}={text}", do="list each device once")
        found.append(entry)
    return found


def visible_count(listed: list[str] | None, present: int) -> int:
    """How many devices one process sees, of `present` on the host: of several MIG slices only the first."""
    if listed is None:
        return present
    return 1 if listed and listed[0].startswith("MIG-") else len(listed)


def mig_note(listed: list[str] | None) -> str | None:
    """What to tell where several MIG slices are listed, of which a process can use one."""
    slices = [entry for entry in listed or () if entry.startswith("MIG-")]
    if len(slices) < 2:  # noqa: PLR2004 - several
        return None
    return f"{VISIBLE} lists {len(slices)} MIG slices, but a process can use only one: {slices[0]}"


def gpu_count(text: str) -> int | None:
    """GPUs in a Slurm request: "8", "a100:2,v100:2" (4), "gpu:a100:4(S:0-1)" (4); None for an empty one.

    Raises:
        WorldError: the text is no such request; it is quoted.
    """
    if not text.strip():
        return None
    total = 0
    for part in re.split(r",(?![^(]*\))", text.strip()):
        found = _GRES.fullmatch(part)
        if not found:
            raise WorldError(f"{text!r} is not a count of GPUs", do="Slurm writes it like 4, a100:4 or gpu:a100:4")
        total += int(next(filter(None, found.groups()), 1))
    return total


def gpus_on_node(environ: Mapping[str, str]) -> int | None:
    """How many GPUs Slurm gave this job on this node, by what it says best; None where it says nothing."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        if (count := gpu_count(environ.get(name, ""))) is not None:
            return count
    for name in ("SLURM_STEP_GPUS", VISIBLE):
        if listed := entries(environ.get(name)):
            return len(listed)
    return None


def own_list(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether this rank's CUDA_VISIBLE_DEVICES is its own rather than one list for all ranks of the node."""
    listed = entries(environ.get(VISIBLE))
    if not listed or launcher in ("none", "worldsize", "torchrun"):
        return False
    if launcher == "slurm":
        return len(listed) < (gpu_count(environ.get("SLURM_GPUS_ON_NODE", "")) or 0)
    return len(listed) == 1


def choose(local_rank: int, local_size: int, count: int, *, own: bool = False) -> int | None:
    """The index of the device for a rank that sees `count` of them; None where it sees none: the CPU.

    Args:
        local_rank: this rank on its node.
        local_size: how many ranks the node has.
        count: how many devices this process sees.
        own: whether it alone sees them (`own_list`).

    Raises:
        WorldError: the ranks of this node share fewer devices than they are.
    """
    if count == 0:
        return None
    if local_size <= count:
        return local_rank
    if own:
        return 0
    raise WorldError(
        f"{local_size} ranks on this node share {count} visible CUDA device(s): {local_size - count} too few",
        found=f"local rank {local_rank}, local size {local_size}, {count} visible",
        do=f"start {count} rank(s) per node, make more devices visible, or give each rank its own",
    )


def threads_per_rank(environ: Mapping[str, str], allowed_cpus: int, local_size: int) -> int | None:
    """Threads for each of `local_size` ranks that share the caller's CPUs; None where the user set OMP_NUM_THREADS.

    Args:
        environ: the caller's environment. In a Slurm job the CPUs it states bound those that the system allows.
        allowed_cpus: how many CPUs the system lets the caller run on.
        local_size: how many ranks share them; 1 for a rank that has its CPUs to itself (a task of `srun`).
    """
    if environ.get("OMP_NUM_THREADS"):
        return None
    stated = environ.get("SLURM_CPUS_PER_TASK" if in_slurm_step(environ) else "SLURM_CPUS_ON_NODE", "")
    cpus = min(allowed_cpus, int(stated)) if stated.isdigit() else allowed_cpus
    return max(1, cpus // local_size)
