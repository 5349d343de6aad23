"""Room: a job spec and a site profile to the text of a batch script. Pure: a preview costs nothing.

The script runs on the job's first node. It starts one step over all nodes in the background, passes stop signals on to
it, and ends with its exit code; where the ranks stopped on request, which they leave in a file because launchers flatten
exit codes, it has the job put back into the queue. It needs bash and Slurm's commands there, and no Python.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.slurm.ways import TASK_A_RANK, WAYS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import PurePath

    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec

_UNHEARD = ("pass_env", "secrets", "conda", "stage", "run_dir")
_SRUN_WAIT_S = 60
"""How long srun lets the other tasks live when one has ended well: ranks end together, or something is wrong."""


@dataclass(frozen=True, slots=True)
class Where:
    """The places of one submitted job, all absolute.

    Attributes:
        folder: the job's own folder, shared by all nodes: script, logs, exit records.
        python: the interpreter of the nodes, with worldsize in it.
    """

    folder: PurePath
    python: str


def script(spec: JobSpec, profile: Profile, where: Where) -> str:
    """The whole batch script."""
    parts = [
        ["#!/bin/bash", *directives(spec, profile, where)],
        _opening(where),
        list(_environment(spec, profile)),
        _step(spec, profile, where),
        _ending(spec, profile),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def directives(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    """The #SBATCH lines, in sbatch's own words."""
    refuse(spec)
    given = {name: value for name, value in _asked(spec, profile, where) if value is not None}
    lines = [_directive(name, value) for name, value in given.items() if name not in profile.skip]
    return [f"#SBATCH {line}" for line in (*lines, *profile.add, *spec.extra)]


def refuse(spec: JobSpec) -> None:
    """Raises ConfigError for what a spec can say and no script does: better than to leave it out in silence."""
    unheard = [name for name in _UNHEARD if getattr(spec, name)]
    if unheard or spec.is_het or spec.launcher not in WAYS:
        raise ConfigError(
            "this cannot be rendered",
            found=", ".join([*unheard, *["nodes with different GPUs"] * spec.is_het]) or f"launcher {spec.launcher}",
            do="leave it out, or write it into setup",
        )


def _asked(spec: JobSpec, profile: Profile, where: Where) -> Iterator[tuple[str, str | bool | None]]:
    plain = ("job_name", "partition", "account", "qos", "constraint", "reservation", "nodes")
    yield from ((_option(name), _text(getattr(spec, name))) for name in plain)
    yield "ntasks-per-node", str(_tasks_per_node(spec))
    yield from _gpus(spec, profile)
    yield "mem", spec.memory_option
    sized = ("cpus_per_task", "mem_per_cpu", "mem_per_gpu", "time", "array", "licenses", "begin", "nice")
    yield from ((_option(name), _text(getattr(spec, name))) for name in sized)
    yield "exclusive", spec.exclusive or None
    yield from ((name, _text(getattr(spec, name))) for name in ("nodelist", "exclude"))
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


def _tasks_per_node(spec: JobSpec) -> int:
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


def _opening(where: Where) -> list[str]:
    return [
        "set -u",
        f"folder={shlex.quote(str(where.folder))}",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "job=${job:-$SLURM_JOB_ID}",
        "attempt=${SLURM_RESTART_COUNT:-0}",
        'export WORLDSIZE_JOB="$job" WORLDSIZE_EXIT_FILE="$folder/exit-$job-$attempt"',
        'mkdir -p "$folder/meet" && rm -f "$WORLDSIZE_EXIT_FILE"',
        'echo "worldsize: job $job, attempt $attempt, on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"',
    ]


def _environment(spec: JobSpec, profile: Profile) -> Iterator[str]:
    for module in (*profile.modules, *spec.modules):
        yield f"module load {shlex.quote(module)} || exit 2"
    for name, value in {**profile.env, **spec.env}.items():
        yield f"export {name}={shlex.quote(value)}"
    if spec.venv:
        yield f"source {shlex.quote(f'{spec.venv}/bin/activate')} || exit 2"
    yield from spec.setup


def _step(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    return ["srun " + " \\\n  ".join(_srun(spec, profile, where)) + " &", "step=$!"]


def _srun(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    per_node = _tasks_per_node(spec)
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


def _ending(spec: JobSpec, profile: Profile) -> list[str]:
    return [
        "trap 'caught=1; kill -s USR1 \"$step\" 2>/dev/null' USR1 TERM",
        "caught=1",
        'while [ "$caught" = 1 ]; do caught=0; wait "$step"; code=$?; done',
        "trap - USR1 TERM",
        'word=; [ -r "$WORLDSIZE_EXIT_FILE" ] && read -r word at < "$WORLDSIZE_EXIT_FILE"',
        'if [ "$code" != 0 ] && [ "$word" = stopped ] && [ ! -e "$folder/stay-$job" ]; then',
        *(f"  {line}" for line in (_REQUEUE if may_requeue(spec, profile) else _FOLLOW)),
        "fi",
        'echo "worldsize: job $job, attempt $attempt, ended with code $code"',
        'exit "$code"',
    ]


_REQUEUE = (
    'echo "worldsize: stopped at step $at; back into the queue"',
    'scontrol requeue "$job" && sleep 60',
)
"""Slurm ends this script when it puts the job back: until then there is nothing to do."""
_FOLLOW = (
    'echo "worldsize: stopped at step $at; a job that follows goes on from there"',
    'sbatch --dependency="afterany:$SLURM_JOB_ID" "$folder/script.sh" && exit 0',
)
