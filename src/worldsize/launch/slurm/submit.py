"""Room: from a job spec to a job in the queue: its folder, its script, the checks before, and where it is found again.

Everything that can be known to be wrong is told before sbatch is asked, and sbatch is asked (`--test-only`) before the
job is handed over. Nothing is left behind where that fails.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.slurm import facts
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.client import Client
    from worldsize.launch.spec import JobSpec

SCRIPT, SPEC = "script.sh", "spec.json"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job that was handed over.

    Attributes:
        job: Slurm's id.
        folder: its own folder.
        name: the job's name.
        submitted: seconds since 1970.
        cluster: the cluster, where sbatch named one.
    """

    job: str
    folder: str
    name: str
    submitted: float
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A job that was not handed over yet: its spec, its places and the text of its script."""

    spec: JobSpec
    where: Where
    text: str


def draft(spec: JobSpec, profile: Profile, folder: Path | None = None) -> Draft:
    """Render the job. Touches nothing.

    Args:
        spec: what is asked for.
        profile: the site.
        folder: the job's own folder; None: `jobs/<name>-<time>` in the working folder of the job.
    """
    home = Path(spec.chdir or Path.cwd()).absolute()
    spec = spec.model_copy(update={"chdir": str(home)})
    stamp = time.strftime("%Y%m%d-%H%M%S")
    where = Where((folder or home / "jobs" / f"{spec.job_name}-{stamp}").absolute(), profile.python or sys.executable)
    return Draft(spec, where, script(spec, profile, where))


def check(made: Draft) -> None:
    """What can be known to be wrong here.

    Raises:
        ConfigError: the script is not there, or a folder cannot be written.
    """
    home, program = Path(str(made.spec.chdir)), made.spec.program
    if not home.is_dir():
        raise ConfigError("the working folder of the job is not there", found=str(home), do="give another --chdir")
    if program and program[0] != "-m" and not (home / program[0]).is_file():
        raise ConfigError(f"there is no script {program[0]}", found=f"working folder {home}", do="see --chdir")


def submit(made: Draft, client: Client, state: Path, *, fill: Callable[[Path], None] | None = None) -> Ticket:
    """Hand the job over.

    Args:
        made: the job.
        client: the cluster.
        state: where this user's jobs are remembered, see `state_folder`.
        fill: puts what else the job needs into its new folder, before Slurm is asked.

    Raises:
        ConfigError: see `check`.
        LaunchError: sbatch refuses it. Its folder is removed again.
    """
    check(made)
    folder = Path(made.where.folder)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError("the job's folder cannot be made", found=str(error), do="give another --job-dir") from error
    try:
        (folder / SCRIPT).write_text(made.text, encoding="utf-8")
        (folder / SPEC).write_text(made.spec.model_dump_json(indent=2), encoding="utf-8")
        if fill is not None:
            fill(folder)
        client.test([str(folder / SCRIPT)])
        answer = client.submit([str(folder / SCRIPT)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ticket = Ticket(answer.job, str(folder), made.spec.job_name, time.time(), answer.cluster)
    remember(ticket, state)
    return ticket


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
