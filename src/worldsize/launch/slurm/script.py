"""Room: a job spec and a site profile to the text of a batch script. Pure: a preview costs nothing.

The script runs on the job's first node. It starts one step over all nodes in the background, passes stop signals on to
it, and ends with its exit code; where the ranks stopped on request, which they leave in a file because launchers flatten
exit codes, it has the job put back into the queue. It needs bash and Slurm's commands there, and no Python.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.launch.slurm.checkup import checkup
from worldsize.launch.slurm.directives import directives
from worldsize.launch.slurm.ending import again, catching, ending
from worldsize.launch.slurm.environment import enter, environment
from worldsize.launch.slurm.step import step

if TYPE_CHECKING:
    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.places import Where
    from worldsize.launch.spec import JobSpec


def script(spec: JobSpec, profile: Profile, where: Where) -> str:
    """The whole batch script."""
    parts = [
        ["#!/bin/bash", *directives(spec, profile, where)],
        _opening(where),
        catching(),
        list(environment(spec, profile)),
        [*again(spec, profile), *checkup(spec, profile, where)] if spec.preflight else [],
        step(spec, profile, where) if spec.exec_command is None else _own_steps(spec.exec_command, spec, profile),
        ending(spec, profile, where),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _own_steps(line: str, spec: JobSpec, profile: Profile) -> list[str]:
    """Bash becomes the last command of the line, so that an srun there gets the stop signal itself."""
    return [f"{enter(spec, profile)}bash -c {shlex.quote(line)} &", "step=$!"]


def _opening(where: Where) -> list[str]:
    return [
        "set -u",
        f"folder={shlex.quote(str(where.folder))}",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "job=${job:-$SLURM_JOB_ID}",
        "attempt=${SLURM_RESTART_COUNT:-0}; began=$EPOCHSECONDS log=$(readlink -f /proc/$$/fd/1)",
        'export WORLDSIZE_JOB="$job" WORLDSIZE_EXIT_FILE="$folder/exit-$job-$attempt"',
        'mkdir -p "$folder/meet" && rm -f "$WORLDSIZE_EXIT_FILE"',
        *_LIMIT,
        'echo "worldsize: job $job, attempt $attempt, on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"',
    ]


_LIMIT = (
    'end=${SLURM_JOB_END_TIME:-$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null)}',
    'case "$end" in *-*T*) end=$(date -d "$end" +%s 2>/dev/null) ;; esac',
    'case "$end" in "" | *[!0-9]*) ;; *) export WORLDSIZE_END_TIME="$end" ;; esac',
)
"""When the job is ended by force: whoever needs longer to save than the stop signal gives him begins earlier."""
