"""Room: how a batch script has its nodes looked at before the step, and what it does about bad ones. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_FAILED, EXIT_STOPPED
from worldsize.launch.container import registry as container
from worldsize.launch.slurm.environment import enter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.places import Where
    from worldsize.launch.spec import JobSpec

BAD = "bad"
"""The variable of the script that names the nodes that are left out."""


def checkup(spec: JobSpec, profile: Profile, where: Where) -> list[str]:
    """The lines of bash; none where the job asks for none. `again` must be defined before them."""
    if not spec.preflight:
        return []
    return [
        f"{BAD}=",
        f"read -r word {BAD} < <({_doctor(spec, profile, where)})",
        'case "${word:-}" in',
        "  go) ;;",
        f'  again) again "bad nodes" "${BAD}"; code={EXIT_STOPPED} ;;',
        f"  end) code={EXIT_FAILED} ;;",
        '  *) echo "worldsize: preflight could not be made: going on without it" ;;',
        "esac",
        'if [ -n "${code:-}" ]; then',
        '  echo "ended $code" >> "$WORLDSIZE_EXIT_FILE"',
        '  echo "worldsize: job $job, attempt $attempt, ended with code $code before its ranks began"',
        '  exit "$code"',
        "fi",
    ]


def without(spec: JobSpec) -> Iterator[str]:
    """The option of srun that keeps a step away from bad nodes."""
    if spec.preflight:
        yield f'${{{BAD}:+--exclude="${BAD}"}}'


def _doctor(spec: JobSpec, profile: Profile, where: Where) -> str:
    inside = container.render(spec, profile)
    python = f"{enter(spec, profile)}{shlex.join(inside.running(where.python))}"
    options = [f'--quick --start-timeout=2m --preflight "$folder" "$job" "$attempt" --need={spec.nodes}']
    given = (
        ("run-dir", spec.run_dir),
        ("nodelist", spec.nodelist),
        ("exclude", spec.exclude),
        ("srun-args", shlex.join(inside.srun)),
    )
    options += [f"--{name}={shlex.quote(value)}" for name, value in given if value]
    return f"{shlex.quote(where.host_python or where.python)} -m worldsize doctor {' '.join(options)} -- {python}"
