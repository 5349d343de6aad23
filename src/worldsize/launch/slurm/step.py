"""Room: the step of a batch script: one srun over all nodes, and what its tasks are told. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.launch.slurm.directives import tasks_per_node
from worldsize.launch.slurm.ways import TASK_A_RANK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.places import Where
    from worldsize.launch.spec import JobSpec

_SRUN_WAIT_S = 60
"""How long srun lets the other tasks live when one has ended well: ranks end together, or something is wrong."""


def step(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    """The lines of bash: the step runs in the background, its process is $step."""
    return ["srun " + " \\\n  ".join(_srun(spec, profile, where)) + " &", "step=$!"]


def _srun(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    per_node = tasks_per_node(spec)
    options = [f"--nodes={spec.nodes} --ntasks={spec.nodes * per_node} --ntasks-per-node={per_node}"]
    if spec.cpus_per_task is not None:
        # Since 22.05 srun does not take it from the job any more.
        options.append(f"--cpus-per-task={spec.cpus_per_task}")
    options.append(f"--kill-on-bad-exit=1 --wait={_SRUN_WAIT_S}")
    if profile.mpi is not None:
        options.append(f"--mpi={profile.mpi}")
    return [*options, f"{shlex.quote(where.python)} -m worldsize node", *_node(spec, profile), _program(spec)]


def _node(spec: JobSpec, profile: Profile) -> Iterator[str]:
    yield f'--launcher={spec.launcher} --meet="$folder/meet" --log-dir="$folder/logs-$job"'
    if spec.launcher != TASK_A_RANK:
        yield f"--nproc-per-node={spec.ranks_per_node} --max-restarts={spec.max_restarts}"
    yield f"--grace={spec.signal_lead}"
    if profile.address_suffix:
        yield f"--address-suffix={shlex.quote(profile.address_suffix)}"
    if profile.interface:
        yield f"--interface={shlex.quote(profile.interface)}"
    if spec.command:
        yield f"--template={shlex.quote(spec.command)}"


def _program(spec: JobSpec) -> str:
    return "-- " + shlex.join(spec.program)
