"""Room: what is done to jobs that were handed over: ended, stopped, put back into the queue, started again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.endings import Ending
from worldsize.launch.slurm import states
from worldsize.launch.slurm.known import unknown
from worldsize.launch.slurm.tickets import SCRIPT, Ticket, remember

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from worldsize.launch.slurm.client import Client, Submitted
    from worldsize.launch.slurm.known import Desk, Known

STOP = "USR1"
"""What a batch script of ours passes on to the ranks, which then save and end."""

_MET = ("#SBATCH --dependency=", "#SBATCH --begin=")
"""What held only for the first start: the jobs that it names may be forgotten by now."""


def cancel(desk: Desk, jobs: Sequence[str], *, stop: bool = False) -> list[str]:
    """End jobs, those included that go on in place of ended ones. None of them goes back into the queue by itself.

    Args:
        desk: where they are known.
        jobs: ids.
        stop: let those that run save first: they end with code 75 as soon as everything is committed.

    Returns:
        A line each.

    Raises:
        ConfigError: there is no such job, or it does not know the stop signal.
        LaunchError: Slurm refuses it.
    """
    every = desk.newest(_surely(desk, jobs))
    strange = [known.job for known in every if known.folder is None and known.live and not known.waits]
    if stop and strange:
        do = "cancel it without --stop"
        raise ConfigError("only jobs of worldsize submit know the stop signal", found=", ".join(strange), do=do)
    live = [known for known in every if known.live]
    for known in live:
        known.stay(out=True)
    _send(desk, [known.job for known in live if known.waits or not stop])
    _send(desk, [known.job for known in live if stop and not known.waits], STOP)
    return [f"{known.job}: {_done(known, stop=stop)}" for known in every]


def requeue(desk: Desk, job: str, *, force: bool = False) -> str:
    """Stop a job and put it back into the queue, or one that has ended; of an array only the member that is named (B039).

    Returns:
        The id that was given to Slurm.

    Raises:
        ConfigError: it is not one job, waits already, is forgotten, or has completed and `force` is not given.
        LaunchError: Slurm refuses it.
    """
    members = _surely(desk, [job])
    known = members[0]
    if len(members) > 1 and (known.facts is None or known.facts.array is not None):
        names = ", ".join(known.job for known in members[:3])
        raise ConfigError(f"{job} is an array of {len(members)} jobs", found=f"{names} ...", do="name the member")
    if known.waits:
        raise ConfigError(f"job {known.job} is in the queue already", do=f"worldsize why {known.job}")
    if known.facts is None or known.facts.source != "squeue":
        raise ConfigError(f"Slurm has forgotten job {known.job}", do=f"worldsize restart {known.job}")
    if known.ended and known.ending is Ending.COMPLETED and not force:
        raise ConfigError(
            f"job {known.job} has completed: Slurm would start it again", do="add --force if that is meant"
        )
    name = job if len(members) > 1 else known.job
    for member in members:
        member.stay(out=False)
    desk.client_of(job).requeue(name)
    return name


def restart(desk: Desk, job: str, asked: Mapping[str, str | None]) -> Ticket:
    """Hand the script of an ended job over again, as a new job in the same folder.

    Args:
        desk: where it is known.
        job: its id, or that of one member of an array.
        asked: options of sbatch that are other ones this time.

    Raises:
        ConfigError: it is not ours, or has not ended.
        LaunchError: Slurm refuses it.
    """
    members = desk.newest(_surely(desk, [job]))
    known = members[0]
    folder, going = known.folder, next((known for known in members if not known.state.final), None)
    if folder is None or not (folder / SCRIPT).is_file():
        found = f"no script in {folder}" if folder else None
        raise ConfigError(f"job {job} was not handed over by worldsize submit", found=found, do="submit it again")
    if going is not None:
        do = f"worldsize cancel {going.job}, or wait for its end"
        raise ConfigError(f"job {going.job} has not ended", found=states.words(going.state), do=do)
    options = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    task = known.job.partition("_")[2] if "_" in job else ""
    answer = _submit(desk.client_of(job), known, folder, [*options, *([f"--array={task}"] if task else [])])
    for member in members:
        (folder / f"next-{member.job}").write_text(f"{answer.job}\n", encoding="utf-8")
    name = str((known.spec or {}).get("job_name", ""))
    ticket = Ticket(
        answer.job, str(folder), name, time.time(), answer.cluster, former=known.job if task else _whole(known)
    )
    remember(ticket, desk.memory)
    return ticket


def _surely(desk: Desk, jobs: Sequence[str]) -> list[Known]:
    """The jobs, where somebody says what they are: nothing is done to what is only remembered here."""
    every = desk.find(jobs)
    for known in every:
        if known.state.name == states.UNKNOWN:
            raise unknown(known)
    return every


def _submit(client: Client, known: Known, folder: Path, options: list[str]) -> Submitted:
    """With the environment that it had at first, and what it needs only once left out."""
    from worldsize.launch.slurm.submit import caller
    from worldsize.launch.spec import JobSpec

    client = caller(client, JobSpec.of(known.spec or {}))
    script = folder / SCRIPT
    lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(_MET)]
    if len(kept) == len(lines):
        return client.submit([*options, str(script)])
    return client.submit(options, script="".join(kept))


def _whole(known: Known) -> str:
    return known.job.partition("_")[0]


def _send(desk: Desk, jobs: Sequence[str], signal: str | None = None) -> None:
    clusters: dict[str | None, list[str]] = {}
    for job in jobs:
        clusters.setdefault(desk.client_of(job).cluster, []).append(job)
    for own in clusters.values():
        desk.client_of(own[0]).cancel(own, signal=signal, batch=signal is not None)


def _done(known: Known, *, stop: bool) -> str:
    if not known.live:
        return f"has ended: {known.ending}" if known.ended else states.words(known.state)
    was = states.words(known.state)
    if stop and not known.waits:
        return f"told to stop; it was {was}. It ends when everything is committed: worldsize wait {known.job}"
    return f"cancelled; it was {was}"
