"""Room: how a batch script ends: stop signals passed on, the step waited for, the job put back where it may go on. Pure.

Where the ranks stopped on request, bash alone decides, at once: little time may be left. What a failure was, and whether
another attempt may end differently, is told by `worldsize after`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_STOPPED
from worldsize.launch.slurm.checkup import BAD
from worldsize.launch.slurm.directives import may_requeue

if TYPE_CHECKING:
    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.places import Where
    from worldsize.launch.spec import JobSpec

_MOST_IDLE = 2
"""Attempts in a row that were stopped and committed nothing, after which a job stays out of the queue."""

_CATCH = (
    "asked= step= caught=",
    "stop() {",
    "  caught=1",
    '  [ -z "$step" ] || [ -n "$asked" ] || { pass_on 2>/dev/null & asked=$!; }',
    "}",
    "pass_on() {",
    "  exec {nap}<> <(:)",
    '  while kill -s USR1 "$step"; do read -r -t 15 -u "$nap"; done',
    "}",
    "trap stop USR1 TERM",
)
"""The signal is passed on until the step has ended: a rank that is just starting may not hear it yet. The pause is bash's own:
a `sleep` would outlive the job."""

_WAIT = (
    '[ -z "$caught" ] || stop',
    "caught=1",
    'while [ "$caught" = 1 ]; do caught=0; wait "$step"; code=$?; done',
    "trap '' USR1 TERM",
    '[ -z "$asked" ] || kill "$asked" 2>/dev/null',
)
"""A signal ends `wait`, whose code is then the signal's: it waits again for the step's own."""

_OVER = (
    "over=",
    'if [ -n "$asked" ]; then',
    '  read -r facts < <(scontrol show job --oneliner "$job" 2>/dev/null)',
    '  case "$facts" in',
    '    *" JobState=COMPLETING Reason=TimeLimit "*) ;;',
    '    *" JobState=COMPLETING "*" Restarts=$attempt "*)',
    '      tail -c 4096 "$log" | grep -q "DUE TO PREEMPTION" || over="somebody has cancelled it" ;;',
    '    *" JobState=COMPLETING "*) over="Slurm has done that" ;;',
    "  esac",
    '  [ -z "$over" ] || echo "worldsize: not put back into the queue: $over"',
    "fi",
    '[ -e "$folder/stay-$job" ] && over=asked',
)
"""Who ends a job by scancel wants it to stay ended; whom Slurm itself puts back need not be put back again."""

_READ = (
    "stopped=; at=0",
    'if [ -r "$WORLDSIZE_EXIT_FILE" ]; then',
    '  while read -r word step _; do case "$word" in',
    "    stopped) stopped=1; at=$step ;;",
    "    committed) at=$step ;;",
    '  esac; done < "$WORLDSIZE_EXIT_FILE"',
    "fi",
    'echo "ended $code" >> "$WORLDSIZE_EXIT_FILE"',
)

_STOPPED = (
    "stopped() {",
    '  progress="$folder/progress-${SLURM_ARRAY_TASK_ID:-0}"; before=0; idle=0',
    '  [ -r "$progress" ] && read -r before idle < "$progress"',
    '  if [ "$at" -gt "$before" ]; then before=$at; idle=0; else idle=$((idle + 1)); fi',
    '  echo "$before $idle" > "$progress"',
    f'  if [ "$idle" -lt {_MOST_IDLE} ]; then again "stopped at step $at"; return; fi',
    '  echo "worldsize: not put back into the queue: nothing was committed since step $before. Do: give it more --time"',
    "}",
)

_REQUEUE = (
    'echo "worldsize: $1; back into the queue"',
    'scontrol requeue "$job" || return',
    'while [ -n "${2:-}" ] && ! scontrol update jobid="$job" excnodelist="$2" 2>/dev/null; do sleep 0.2; done',
    "sleep 60",
)
"""Slurm ends this script when it puts the job back; nodes can be left out as soon as it waits again."""

_FOLLOW = (
    'echo "worldsize: $1; a job that follows goes on from there"',
    "for name in ${!SLURM_@} ${!SBATCH_@} ${!SRUN_@}; do",
    '  case "$name" in SLURM_CONF | SLURM_JWT | SLURM_ARRAY_TASK_ID | SLURM_JOB_ID) ;; *) unset "$name" ;; esac',
    "done",
    'set -- --dependency="afterany:$SLURM_JOB_ID" ${2:+--exclude="$2"}',
    'set -- "$@" ${SLURM_ARRAY_TASK_ID:+--array="$SLURM_ARRAY_TASK_ID"}',
    'sbatch --parsable "$@" "$folder/script.sh" > "$folder/next-$job" || return',
    'echo "followed $(cat "$folder/next-$job")" >> "$WORLDSIZE_EXIT_FILE"',
)
"""It ends with the code of the training: who waits for it with afterok must not start yet."""


def catching() -> list[str]:
    """The lines of bash that stand before the step: a stop may come while it starts."""
    return list(_CATCH)


def again(spec: JobSpec, profile: Profile) -> list[str]:
    """The lines of bash that define how the job comes again: `again WHY [NODES]`, without these nodes."""
    return ["again() {", *_indented(_REQUEUE if may_requeue(spec, profile) else _FOLLOW), "}"]


def ending(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    """The lines of bash."""
    return [
        *_WAIT,
        *_READ,
        *_OVER,
        *([] if spec.preflight else again(spec, profile)),
        *_STOPPED,
        f'[ "$code" = 0 ] || [ -z "$stopped" ] || code={EXIT_STOPPED}',
        'if [ "$code" = 0 ] || [ -n "$over" ]; then :',
        f'elif [ "$code" = {EXIT_STOPPED} ]; then stopped',
        "else",
        *_indented(_failed(spec, where)),
        "fi",
        'echo "worldsize: job $job, attempt $attempt, ended with code $code"',
        'exit "$code"',
    ]


def _failed(spec: JobSpec, where: Where) -> list[str]:
    python = shlex.quote(where.host_python or where.python)
    ranks = ",".join(map(str, spec.ranks)) if spec.is_het else str(spec.ranks_per_node)
    facts = f'--ranks={ranks} --log="$log" --began="$began" ${{asked:+--asked}}'
    limits = f"--max-restarts={spec.max_restarts}{'' if spec.exclude_bad_nodes else ' --no-exclude'}"
    limits += f' ${{{BAD}:+--without="${BAD}"}}' if spec.preflight else ""
    kept = f",{spec.exclude}" if spec.exclude else ""  # Slurm replaces its list, and adds nothing to it
    return [
        f'read -r root what nodes < <({python} -m worldsize after {facts} {limits} "$folder" "$job" "$attempt" "$code")',
        "code=${root:-$code}",
        f'case "${{what:-}}" in again) again "tried again" "${{nodes:+$nodes{kept}}}" ;; stopped) stopped ;; esac',
    ]


def _indented(lines: tuple[str, ...] | list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
