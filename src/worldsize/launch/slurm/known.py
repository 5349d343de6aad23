"""Room: what is known of a job: from squeue, then sacct, then the record that it writes itself, and from our own ticket.

It is found from any folder and in any later shell: the ticket says which folder is the job's.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, LaunchError
from worldsize.launch import env
from worldsize.launch.endings import Ending
from worldsize.launch.failure import SIGNALLED
from worldsize.launch.slurm import classes, exitfile, logs, states
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.states import UNKNOWN, Asked, ExitRecord, JobFacts, State
from worldsize.launch.slurm.tickets import SPEC, Ticket, recall, remember, state_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_TERM = 15


@dataclass(frozen=True)
class Known:
    """One job, member of an array, or part of a heterogeneous job.

    Attributes:
        state: what Slurm says of it, or its record.
        folder: the job's own; None where it is not ours.
        ticket: of its submission here; None where it was submitted by others, or elsewhere.
        record: what its newest attempt wrote.
        spec: its job spec, as plain values.
    """

    state: State
    folder: Path | None = None
    ticket: Ticket | None = None
    record: ExitRecord | None = None
    spec: Mapping[str, Any] | None = None

    @property
    def job(self) -> str:
        """Its id."""
        return self.state.job

    @property
    def facts(self) -> JobFacts | None:
        """What Slurm tells."""
        return self.state.facts

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state.name in states.WAITING

    @property
    def live(self) -> bool:
        """Whether it waits or runs."""
        return self.waits or self.state.name in states.ACTIVE

    @property
    def ended(self) -> bool:
        """Whether it is over, as far as somebody says so."""
        return self.state.name in states.ENDED

    @cached_property
    def ending(self) -> Ending:
        """How it ended."""
        return classes.classify(self.state, self.record, self.tail)

    @cached_property
    def tail(self) -> str:
        """The end of what its newest attempt printed; nothing where its log cannot be read."""
        files = logs.of_job(self)
        return logs.newest(files[0].path)[1] if files else ""

    @property
    def code(self) -> int:
        """The exit code of its training: 0 only where that has completed."""
        if self.ending is Ending.COMPLETED:
            return 0
        if self.ending is Ending.STOPPED:
            return EXIT_STOPPED
        facts, own = self.facts, self.record is not None and self.record.of(self.facts)
        said = self.record.code if self.record is not None and own else None
        if not said and facts is not None:
            said = facts.exit_code or (SIGNALLED + facts.signal if facts.signal else None)
        return said or (SIGNALLED + _TERM if self.state.name in {"CANCELLED", "TIMEOUT"} else EXIT_FAILED)

    @property
    def next(self) -> str | None:
        """The job that goes on in its place, where it could not go back into the queue under its own id."""
        if self.folder is None:
            return None
        try:
            number = (self.folder / f"next-{self.job}").read_text(encoding="utf-8").strip().partition(";")[0]
        except OSError:
            return None
        task = self.job.partition("_")[2]
        return (f"{number}_{task}" if task else number) if number.isdigit() else None

    def stay(self, *, out: bool) -> None:
        """Keep it out of the queue when it ends now, which its batch script looks for; or no longer."""
        if self.folder is None:
            return
        marker = self.folder / f"stay-{self.job}"
        if out:
            marker.touch()
        else:
            marker.unlink(missing_ok=True)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        record = None if self.record is None else asdict(self.record)
        own = {"folder": None if self.folder is None else str(self.folder), "record": record, "next": self.next}
        return {**self.state.to_json(), "ending": str(self.ending) if self.ended else None, **own}


@dataclass(frozen=True)
class Desk:
    """Where one asks about jobs.

    Args:
        client: the cluster.
        memory: where the tickets are kept, see `submit.state_folder`.
    """

    client: Client
    memory: Path

    @classmethod
    def here(cls, cluster: str | None = None) -> Desk:
        """As this process's environment has it."""
        environ = env.read()
        return cls(Client(environ, cluster), state_folder(environ))

    def client_of(self, job: str) -> Client:
        """The cluster that a job was handed over to."""
        ticket = recall(job, self.memory)
        named = self.client.cluster or (ticket.cluster if ticket else None)
        return replace(self.client, cluster=named)

    def look(self, jobs: Sequence[str], *, seen: float | None = None) -> dict[str, list[Known]]:
        """The members of each job. Accounting is asked only for what squeue does not list.

        Args:
            jobs: ids.
            seen: when they were last listed anywhere, seconds since 1970.
        """
        found: dict[str, list[Known]] = {}
        clusters: dict[str | None, list[str]] = {}
        for job in jobs:
            clusters.setdefault(self.client_of(job).cluster, []).append(job)
        for cluster, own in clusters.items():
            found |= self._look(replace(self.client, cluster=cluster), own, seen)
        return {job: found[job] for job in jobs}

    def find(self, jobs: Sequence[str]) -> list[Known]:
        """As `look`, in one list.

        Raises:
            ConfigError: nobody knows one of them, nor did we hand it over.
            LaunchError: Slurm does not answer.
        """
        every = [known for members in self.look(jobs).values() for known in members]
        for known in every:
            if known.state.name == UNKNOWN and known.facts is None and known.folder is None:
                raise unknown(known)
        return list({known.job: known for known in every}.values())

    def newest(self, every: Sequence[Known]) -> list[Known]:
        """Each of these, or the last of those that went on in its place."""
        found: dict[str, Known] = {}
        for known in every:
            passed = {known.job}
            while not known.live and known.next and known.next not in passed:
                passed.add(known.next)
                known = self.look([known.next])[known.next][0]  # noqa: PLW2901 - the next of the chain
            found[known.job] = known
        return list(found.values())

    def _look(self, client: Client, jobs: Sequence[str], seen: float | None) -> dict[str, list[Known]]:
        queue = client.listing(jobs)
        rest = [job for job in jobs if not any(states.belongs(facts, job) for facts in queue.jobs)]
        accounting = client.accounting(rest) if rest else None
        found = {}
        for job in jobs:
            every = [*queue.jobs, *(accounting.jobs if accounting else ())]
            of_job = [facts for facts in every if states.belongs(facts, job)]
            ticket = _valid(recall(job, self.memory), of_job)
            folder = Path(ticket.folder) if ticket else _folder(of_job)
            records = _records(folder, job) if folder else {}
            asked = Asked(job, time.time(), ticket.submitted if ticket else None, seen)
            spec = _spec(folder) if folder else None
            found[job] = [
                Known(state, folder, ticket, records.get(state.job), spec)
                for state in states.gather(asked, queue, accounting, records).values()
            ]
            self._adopt(found[job])
        return found

    def _adopt(self, members: Sequence[Known]) -> None:
        """Remember the jobs that go on in place of these: their batch scripts submitted them."""
        for known in members:
            number = (known.next or "").partition("_")[0]
            if known.folder is None or not number or recall(number, self.memory) is not None:
                continue
            submitted = (known.folder / f"next-{known.job}").stat().st_mtime
            name = str((known.spec or {}).get("job_name", ""))
            cluster = known.ticket.cluster if known.ticket else None
            remember(Ticket(number, str(known.folder), name, submitted, cluster, former=known.job), self.memory)


def record(path: Path) -> ExitRecord | None:
    """What an attempt wrote into this file (`exitfile`), None where it wrote nothing."""
    told = exitfile.read(path)
    if told == exitfile.Told():
        return None
    code = EXIT_STOPPED if told.stopped and told.code != 0 else told.code
    failed, attempt = told.failed, path.name.rpartition("-")[2]
    return ExitRecord(
        code=EXIT_FAILED if code is None and failed else code,
        line=failed.line if failed else "",
        step=told.step,
        time=path.stat().st_mtime,
        restarts=int(attempt) if attempt.isdigit() else None,
        ending=failed.ending if failed else None,
    )


def _records(folder: Path, job: str) -> dict[str, ExitRecord]:
    """The newest record of the job and of each member, by id."""
    newest: dict[str, ExitRecord] = {}
    for path in [*folder.glob(f"exit-{job}-*"), *folder.glob(f"exit-{job}_*-*")]:
        found, name = record(path), path.name.removeprefix("exit-").rpartition("-")[0]
        if found is not None and (name not in newest or (found.restarts or 0) > (newest[name].restarts or 0)):
            newest[name] = found
    return newest


def _valid(ticket: Ticket | None, of_job: Iterable[JobFacts]) -> Ticket | None:
    """The ticket, where it is of this job: ids come again. A later submission is another job's, unless it was requeued."""
    if ticket is None:
        return None
    newest = max(of_job, key=lambda facts: facts.submit or 0, default=None)
    if newest is None or newest.submit is None or newest.submit <= ticket.submitted + states.CLOCKS_S:
        return ticket
    return ticket if newest.restarts != 0 and newest.name == ticket.name else None


def _folder(of_job: Iterable[JobFacts]) -> Path | None:
    """The job's own folder, where its log is in one of ours: a job that follows has no ticket."""
    for facts in of_job:
        folder = Path(facts.stdout).parent
        if facts.stdout.startswith("/") and (folder / SPEC).is_file():
            return folder
    return None


def _spec(folder: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def unknown(known: Known) -> LaunchError | ConfigError:
    """The error for a job of which nobody tells anything."""
    note = known.state.note
    if not known.state.final:
        return LaunchError(f"nothing can be told of job {known.job}", found=note, do="try again in a minute")
    do = "see yours with worldsize jobs; ended ones are forgotten after a while"
    return ConfigError(f"there is no job {known.job}", found=note, do=do)
