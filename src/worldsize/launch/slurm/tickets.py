"""Room: what is remembered of jobs that were handed over: a small file each, in the user's own state folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.launch.slurm import facts

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT, SPEC = "script.sh", "spec.json"
"""In the job's folder."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job that was handed over.

    Attributes:
        job: Slurm's id.
        folder: its own folder.
        name: the job's name.
        submitted: seconds since 1970.
        cluster: the cluster, where sbatch named one.
        former: the job whose folder it goes on in.
        notes: what sbatch said besides: a site's banner, a default that it took.
    """

    job: str
    folder: str
    name: str
    submitted: float
    cluster: str | None = None
    former: str | None = None
    notes: str = ""


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where a user's jobs are remembered, so that commands work from any folder and in a later shell."""
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".local" / "state")
    return Path(base) / "worldsize" / "jobs"


def remember(ticket: Ticket, state: Path) -> None:
    """Keep where a job is. Ids come again on another cluster, or when a controller is set up anew: the newest counts."""
    facts.put(state / f"{ticket.job}.json", ticket)


def recall(job: str, state: Path) -> Ticket | None:
    """Where a job is, None where it was not handed over by us, here."""
    number = job.partition("_")[0].partition("+")[0]
    try:
        return Ticket(**facts.get(state / f"{number}.json"))
    except (OSError, ValueError):
        return None
