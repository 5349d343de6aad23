"""Room: the #SBATCH lines of a job: a spec's words and a site's, in sbatch's own. Pure."""

from __future__ import annotations

import re
import shlex
from itertools import groupby
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.slurm.ways import TASK_A_RANK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.places import Where
    from worldsize.launch.spec import JobSpec


def directives(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    """The #SBATCH lines, in sbatch's own words."""
    _array_fits(spec, profile)
    first, *others = parts(spec)
    lines = [*_rendered(_asked(first, profile), profile), *_rendered(_whole(spec, profile, where), profile)]
    lines += [*profile.add, *spec.extra]
    for part in others:
        lines += ["hetjob", *_rendered(_asked(part, profile), profile)]
    return [f"#SBATCH {line}" for line in lines]


def _array_fits(spec: JobSpec, profile: Profile) -> None:
    most = profile.max_array_size
    largest = max(map(int, re.findall(r"\d+", (spec.array or "").partition("%")[0])), default=0)
    if most is not None and largest >= most:
        do = f"number the members from 0 to {most - 1} at most; several arrays, or more work a member"
        raise ConfigError(
            "the array goes beyond what this cluster takes", found=f"{spec.array}, max_array_size {most}", do=do
        )


def parts(spec: JobSpec) -> list[JobSpec]:
    """A spec for each run of nodes with the same number of GPUs: more than one make a heterogeneous job."""
    if not isinstance(spec.gpus_per_node, tuple):
        return [spec]
    runs = [(gpus, len(list(nodes))) for gpus, nodes in groupby(spec.gpus_per_node)]
    return [spec.model_copy(update={"gpus_per_node": gpus, "nodes": nodes}) for gpus, nodes in runs]


def _rendered(asked: Iterable[tuple[str, str | bool | None]], profile: Profile) -> list[str]:
    given = {name: value for name, value in asked if value is not None}
    return [_directive(name, value) for name, value in given.items() if name not in profile.skip]


def _asked(spec: JobSpec, profile: Profile) -> Iterator[tuple[str, str | bool | None]]:
    """What is asked for each part of a job."""
    plain = ("job_name", "partition", "account", "qos", "constraint", "reservation")
    yield from ((_option(name), _text(getattr(spec, name))) for name in plain)
    yield "nodes", str(spec.nodes + spec.spare_nodes)
    yield "ntasks-per-node", str(tasks_per_node(spec))
    yield from _gpus(spec, profile)
    yield "mem", spec.memory_option
    sized = ("cpus_per_task", "mem_per_cpu", "mem_per_gpu")
    yield from ((_option(name), _text(getattr(spec, name))) for name in sized)
    yield "exclusive", spec.exclusive or None
    yield "exclude", _text(spec.exclude)


def _whole(spec: JobSpec, profile: Profile, where: Where) -> Iterator[tuple[str, str | bool | None]]:
    """What is asked once, with the first part."""
    whole = ("time", "array", "licenses", "begin", "nice", "nodelist")
    yield from ((_option(name), _text(getattr(spec, name))) for name in whole)
    if spec.dependency:
        yield "dependency", ",".join(":".join((kind, *map(str, ids))) for kind, ids in spec.dependency)
        yield "kill-on-invalid-dep", "yes"
    # "B:" sends it to this script alone, which passes it on: a signal to the steps would end srun's own helpers too.
    yield "signal", f"B:USR1@{spec.signal_lead}"
    yield "requeue" if may_requeue(spec, profile) else "no-requeue", True
    yield "open-mode", "append"
    yield "chdir", spec.chdir
    pattern = "slurm-%A_%a.out" if spec.array else "slurm-%j.out"
    yield "output", spec.output or str(where.folder / pattern)
    yield "error", spec.error
    yield from ((_option(name), _text(getattr(spec, name))) for name in ("comment", "mail_type", "mail_user"))


def may_requeue(spec: JobSpec, profile: Profile) -> bool:
    """Whether the job may go back into the queue under its own id."""
    return profile.requeue if spec.requeue is None else spec.requeue


def tasks_per_node(spec: JobSpec) -> int:
    """Tasks of the step on each node: one a rank, or one that starts the node's ranks."""
    if spec.exec_command is not None:
        return spec.ntasks_per_node or 1
    return spec.ranks_per_node if spec.launcher == TASK_A_RANK else 1


def _gpus(spec: JobSpec, profile: Profile) -> Iterator[tuple[str, str | None]]:
    if spec.gpus_per_node is not None and profile.gpus_form == "gres":
        yield "gres", f"{profile.gres_name}:{spec.gpus_per_node}"
    else:
        yield "gres", _text(spec.gres)
        yield "gpus-per-node", _text(spec.gpus_per_node)


def _option(name: str) -> str:
    return name.replace("_", "-")


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _directive(name: str, value: str | bool) -> str:
    """One option. Slurm splits these lines like a shell does, so that quoting is the shell's."""
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
