"""Room: the step of a batch script: one srun over all nodes, and what its tasks are told. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.launch.container import registry as container
from worldsize.launch.slurm.checkup import without
from worldsize.launch.slurm.directives import parts, tasks_per_node
from worldsize.launch.slurm.environment import enter, told
from worldsize.launch.slurm.ways import ONE_TASK, TASK_A_RANK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.places import Where
    from worldsize.launch.spec import JobSpec


def step(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    """The lines of bash: the step runs in the background, its process is $step."""
    return ["srun " + " \\\n  ".join(_srun(spec, profile, where)) + " &", "step=$!"]


def _srun(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    options = [_tasks(spec), *without(spec)]
    if spec.cpus_per_task is not None:
        # Since 22.05 srun does not take it from the job any more.
        options.append(f"--cpus-per-task={spec.cpus_per_task}")
    # Explicit, since a site's WaitTime would kill a rank that still exports when the others have ended well.
    options.append("--kill-on-bad-exit=1 --wait=0")
    if spec.launcher == TASK_A_RANK and spec.world_size > 1:
        options.append("--label")
    if profile.mpi is not None:
        options.append(f"--mpi={profile.mpi}")
    binds = (("cpu", spec.cpu_bind), ("gpu", spec.gpu_bind))
    options += [f"--{name}-bind={shlex.quote(bind)}" for name, bind in binds if bind]
    inside = container.render(spec, profile)
    options += map(shlex.quote, inside.srun)
    node = f"{enter(spec, profile)}{shlex.join(inside.running(where.python))} -m worldsize node"
    return [*options, node, *_node(spec, profile), _program(spec)]


def _tasks(spec: JobSpec) -> str:
    """How many tasks, where."""
    if spec.launcher == ONE_TASK:
        return "--nodes=1 --ntasks=1"
    if spec.is_het:
        # Each part has its own counts, which srun knows from the job.
        return f"--het-group={','.join(map(str, range(len(parts(spec)))))}"
    per_node = tasks_per_node(spec)
    return f"--nodes={spec.nodes} --ntasks={spec.nodes * per_node} --ntasks-per-node={per_node}"


def _node(spec: JobSpec, profile: Profile) -> Iterator[str]:
    yield f'--launcher={spec.launcher} --meet="$folder/meet" --log-dir="$folder/logs-$job"'
    if spec.launcher != TASK_A_RANK:
        each = ",".join(map(str, spec.ranks)) if spec.is_het else spec.ranks_per_node
        yield f"--nproc-per-node={each} --max-restarts={spec.max_restarts}"
    yield f"--grace={spec.signal_lead}"
    if profile.address_suffix:
        yield f"--address-suffix={shlex.quote(profile.address_suffix)}"
    if profile.interface:
        yield f"--interface={shlex.quote(profile.interface)}"
    yield from told(spec)
    if spec.command:
        yield f"--template={shlex.quote(spec.command)}"


def _program(spec: JobSpec) -> str:
    return "-- " + shlex.join(spec.program)
