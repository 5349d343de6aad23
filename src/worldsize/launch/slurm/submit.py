"""Room: from a job spec to a job in the queue: its folder, its script, the checks before, and where it is found again.

Everything that can be known to be wrong is told before sbatch is asked, and sbatch is asked (`--test-only`) before the
job is handed over. Nothing is left behind where that fails.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch import env, fingerprint, preflight, secrets
from worldsize.launch.container import places as containers
from worldsize.launch.slurm import facts, preparing
from worldsize.launch.slurm.environment import carried, interpreter
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script
from worldsize.launch.slurm.tickets import SCRIPT, SPEC, Ticket, recall, remember, state_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worldsize.launch.profile import Profile
    from worldsize.launch.slurm.client import Client
    from worldsize.launch.spec import JobSpec

__all__ = [
    "SCRIPT", "SPEC", "Draft", "Ticket", "caller", "check", "draft", "furnish", "recall", "remember", "state_folder", "submit",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """A job that was not handed over yet: its spec, its places and the text of its script."""

    spec: JobSpec
    where: Where
    text: str


def draft(
    spec: JobSpec, profile: Profile, folder: Path | None = None, *, environ: Mapping[str, str] | None = None
) -> Draft:
    """Render the job. Touches nothing.

    Args:
        spec: what is asked for.
        profile: the site.
        folder: the job's own folder; None: `jobs/<name>-<time>` in the working folder of the job.
        environ: the submitter's environment; None: this process's.

    Raises:
        ConfigError: the spec names a variable that is not set there; or see `preparing.resolved`.
    """
    spec = preparing.whole(spec)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    place = (folder or _free(Path(str(spec.chdir)) / "jobs" / f"{spec.job_name}-{stamp}")).absolute()
    python = profile.python or sys.executable
    where = Where(place, interpreter(spec, python), host_python=python)
    environ = env.read() if environ is None else environ
    own = preparing.resolved(spec, place, environ, profile.pass_env)
    own = containers.bound(own, place, profile, environ)
    spec = spec.model_copy(update={"container": own.container})
    return Draft(spec, where, script(own, profile, where))


def _free(folder: Path) -> Path:
    """This folder, or where it is there the first of its numbered names: a shell's loop submits several a second."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 100)))
    return next((name for name in names if not name.exists()), folder)


def check(made: Draft) -> None:
    """What can be known to be wrong here.

    Raises:
        ConfigError: the script or another path is not there, or the run that it goes on with does not fit its ranks.
    """
    spec = made.spec
    home, program = Path(str(spec.chdir)), spec.program
    if not home.is_dir():
        raise ConfigError("the working folder of the job is not there", found=str(home), do="give another --chdir")
    if program and program[0] != "-m" and not (home / program[0]).is_file():
        raise ConfigError(f"there is no script {program[0]}", found=f"working folder {home}", do="see --chdir")
    preparing.check(spec)
    containers.check(spec, Path(made.where.folder))
    if spec.run_dir and program and not spec.is_het:
        preflight.fits(spec.run_dir, spec.world_size, spec.env.get("WORLDSIZE_STRATEGY", ""))


def caller(client: Client, spec: JobSpec) -> Client:
    """Who calls sbatch for a job: with the environment that the job begins with."""
    kept = {name: value for name, value in client.environ.items() if name in client.keep}
    return replace(client, environ=kept | carried(client.environ, spec))


def furnish(made: Draft, environ: Mapping[str, str]) -> None:
    """Put what the job needs besides its script into its folder: secrets, the code's copy, the fingerprint.

    Raises:
        ConfigError: a secret is not set, or the code cannot be copied.
    """
    folder, spec = Path(made.where.folder), made.spec
    for log in filter(None, (spec.output, spec.error)):
        _writable(Path(str(spec.chdir), log).parent)
    if spec.secrets:
        secrets.leave(folder / secrets.FILE, secrets.values(spec.secrets, environ))
    if spec.snapshot:
        preparing.copy_code(spec, folder)
    code = None if spec.snapshot else Path(str(spec.chdir))
    # The Python of an image is not to be asked here.
    if spec.program and not spec.container and (found := fingerprint.of(made.where.python, code, environ)):
        facts.put(folder / fingerprint.FILE, found)


def _writable(folder: Path) -> None:
    """Slurm opens logs before the script runs, and makes no folders (B032)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written"
    except OSError as error:
        found = str(error)
    if found:
        raise ConfigError("the log cannot be written", found=found, do="give another --output")


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
        _fill(made, client, fill)
        client = caller(client, made.spec)
        client.test([str(folder / SCRIPT)])
        answer = client.submit([str(folder / SCRIPT)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ticket = Ticket(answer.job, str(folder), made.spec.job_name, time.time(), answer.cluster, notes=answer.notes)
    try:
        remember(ticket, state)
    except OSError as error:
        # It is in the queue: whoever called must have its number.
        return replace(ticket, notes=f"{ticket.notes}\nit is not remembered here: {error}".strip())
    return ticket


def _fill(made: Draft, client: Client, fill: Callable[[Path], None] | None) -> None:
    folder = Path(made.where.folder)
    try:
        (folder / SCRIPT).write_text(made.text, encoding="utf-8")
        (folder / SPEC).write_text(made.spec.model_dump_json(indent=2), encoding="utf-8")
        furnish(made, client.environ)
        if fill is not None:
            fill(folder)
    except OSError as error:
        raise ConfigError(
            "the job's folder cannot be filled", found=str(error), do="give another --job-dir"
        ) from error
