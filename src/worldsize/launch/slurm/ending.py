"""Room: how a batch script ends: stop signals passed on, the step waited for, the job put back where it stopped. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.launch.slurm.directives import may_requeue

if TYPE_CHECKING:
    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec


def ending(spec: JobSpec, profile: Profile) -> list[str]:
    """The lines of bash."""
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
