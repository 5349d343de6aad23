"""Room: Slurm's commands. The one place that calls squeue, sacct, scontrol, sinfo, scancel and sbatch.

What goes wrong with them is one line with Slurm's own words. Commands that only look leave nothing behind and may be
repeated.
"""

from __future__ import annotations

import pwd
import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, LaunchError, NotStartedError
from worldsize.launch import env as environment
from worldsize.launch import shell
from worldsize.launch.slurm import nodes, states
from worldsize.launch.slurm.states import END, Listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from worldsize.launch.shell import Done
    from worldsize.launch.slurm.nodes import NodeFacts, PartitionFacts
    from worldsize.launch.slurm.states import JobFacts

CHUNK = 200
"""Job ids in one command line."""

_OUTER = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "PMI_", "PMI2_",
    "PMIX_",
)  # fmt: skip
_SITE = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_DEBUG_FLAGS"})
"""Where Slurm's configuration is, and who we are to it: without these no command would work."""

_NO_SUCH_JOB = re.compile(r"Invalid job id specified")
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Connection (?:refused|timed out)|Zero Bytes were transmitted|Socket timed out"
    r"|Unable to process configuration file|slurm_persist_conn_open|Problem talking to the database",
    re.IGNORECASE,
)
_ANSWER = re.compile(r"^(?:Submitted batch job )?(?P<job>\d+)(?:;(?P<a>\S+)| on cluster (?P<b>\S+))?$", re.MULTILINE)
_ADVICE = (
    (_UNREACHABLE, "see `scontrol ping`, and try again in a minute"),
    (re.compile(r"partition name|invalid partition", re.IGNORECASE), "see the partitions with `worldsize nodes`"),
    (re.compile(r"[Ii]nvalid account|account/partition"), "see yours with `sacctmgr show assoc user=$USER`"),
    (
        re.compile(r"node configuration is not available"),
        "ask for no more than one node has: see `scontrol show nodes`",
    ),
    (re.compile(r"[Ii]nvalid qos"), "see yours with `sacctmgr show assoc user=$USER format=qos`"),
    (re.compile(r"denied"), "only its owner or an administrator may"),
    (_NO_SUCH_JOB, "see your jobs with `worldsize jobs`; ended ones are forgotten after a while"),
)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What sbatch answered: the job's id, the cluster where it named one, and what it said besides."""

    job: str
    cluster: str | None = None
    notes: str = ""


def outside(environ: Mapping[str, str], *, keep: Iterable[str] = ()) -> dict[str, str]:
    """The environment without what a job around us was given: it would become options of ours (B012).

    Args:
        environ: any environment.
        keep: names that a site wants to stay, besides those of Slurm's own configuration.
    """
    kept = _SITE | set(keep)
    return {name: value for name, value in environ.items() if name in kept or not name.startswith(_OUTER)}


@dataclass(frozen=True)
class Client:
    """Slurm, as one user of one cluster sees it.

    Args:
        environ: what commands are run with; this process's environment if not given. See `outside`.
        cluster: another than the default one, for sites with several.
        timeout: seconds that a command may take.
        keep: names of variables that `outside` is to leave.
    """

    environ: Mapping[str, str] = field(default_factory=environment.read)
    cluster: str | None = None
    timeout: float = 60.0
    keep: tuple[str, ...] = ()

    def queue(self, jobs: Sequence[str] | None = None, *, user: str | None = None) -> list[JobFacts]:
        """The jobs that squeue lists: those named, ended ones too while it knows them; else the waiting and running.

        Ids that it does not know are left out. Naming one member of an array brings all of that array.

        Raises:
            LaunchError: squeue is missing, or has no answer.
            ConfigError: an id is none.
        """
        argv = ["squeue", *self._clusters(), "--all", "--noheader", "--array", "--Format", states.QUEUE_FORMAT]
        if jobs is None:
            done = self._look([*argv, *(["--user", user] if user else [])])
            return states.parse_queue(done.out)
        return [facts for chunk in _chunks(jobs) for facts in self._queued(argv, chunk)]

    def listing(self, jobs: Sequence[str] | None = None, *, user: str | None = None) -> Listing:
        """As `queue`, but an answer that is missing is told in the listing."""
        try:
            return Listing(tuple(self.queue(jobs, user=user)))
        except ConfigError:
            raise
        except LaunchError as error:
            return Listing(missing=_said("squeue", error))

    def accounting(
        self, jobs: Sequence[str] | None = None, *, user: str | None = None, since: float | None = None
    ) -> Listing:
        """What sacct keeps of jobs, each incarnation of a requeued one. `missing` says where it keeps nothing or fails.

        Args:
            jobs: ids; None: all that the user may see.
            user: only this one's.
            since: seconds since 1970; None: a day back without ids, and from the beginning with them.
        """
        argv = ["sacct", *self._clusters(), "--allocations", "--duplicates", "--noheader", "--parsable"]
        argv += [f"--delimiter={END}", f"--format={states.ACCOUNT_FORMAT}"]
        argv += [f"--user={user}"] if user else []
        start = "1970-01-02" if jobs is not None else "now-1day"
        argv += [f"--starttime={start if since is None else _stamp(since)}"]
        chunks = [None] if jobs is None else list(_chunks(jobs))
        try:
            found = [self._look([*argv, *(["--jobs", ",".join(chunk)] if chunk else [])]).out for chunk in chunks]
        except ConfigError:
            raise
        except LaunchError as error:
            return Listing(missing=_said("sacct", error))
        return Listing(tuple(_with_name(facts) for text in found for facts in states.parse_accounting(text)))

    def nodes(self) -> list[NodeFacts]:
        """Every node.

        Raises:
            LaunchError: sinfo is missing, or has no answer.
        """
        argv = ["sinfo", *self._clusters(), "--all", "--noheader", "--Node", "--Format", nodes.NODE_FORMAT]
        return nodes.parse_nodes(self._look(argv).out)

    def partitions(self) -> list[PartitionFacts]:
        """Every partition.

        Raises:
            LaunchError: scontrol is missing, or has no answer.
        """
        argv = ["scontrol", *self._clusters(), "--all", "--oneliner", "show", "partition"]
        return nodes.parse_partitions(self._look(argv).out)

    def config(self) -> dict[str, str]:
        """Slurm's configuration as the controller has it.

        Raises:
            LaunchError: scontrol is missing, or has no answer.
        """
        lines = self._look(["scontrol", *self._clusters(), "show", "config"]).out.splitlines()
        pairs = [line.partition("=") for line in lines if "=" in line]
        return {name.strip(): value.strip() for name, _, value in pairs}

    def submit(self, argv: Sequence[str], *, script: str = "", cwd: Path | None = None) -> Submitted:
        """Hand a job over: `argv` is what follows `sbatch`, `script` what it reads where no file is named.

        Raises:
            NotStartedError: it was refused.
            LaunchError: sbatch answered with no id.
        """
        done = self._run(["sbatch", *self._clusters(), "--parsable", *argv], script=script, cwd=cwd)
        if done.code:
            raise _refused(done, NotStartedError)
        return parse_submitted(done.out, done.err)

    def test(self, argv: Sequence[str], *, script: str = "", cwd: Path | None = None) -> str:
        """What sbatch says of a job that it is not given: when it would start.

        Raises:
            NotStartedError: it would be refused.
        """
        done = self._run(["sbatch", *self._clusters(), "--test-only", *argv], script=script, cwd=cwd)
        if done.code:
            raise _refused(done, NotStartedError)
        return (done.err or done.out).strip()

    def cancel(
        self, jobs: Sequence[str], *, signal: str | None = None, batch: bool = False, full: bool = False
    ) -> None:
        """End jobs, or send them a signal. An id that is over or unknown is no error to Slurm.

        Args:
            jobs: ids.
            signal: USR1 and the like: to the steps; nothing is ended by scancel itself.
            batch: only to the batch shell.
            full: to the batch shell and the steps.

        Raises:
            LaunchError: scancel is missing, or was refused.
        """
        flags = [*([f"--signal={signal}"] if signal else []), *["--batch"] * batch, *["--full"] * full]
        for chunk in _chunks(jobs):
            self._look(["scancel", *self._clusters(), *flags, *chunk])

    def requeue(self, job: str) -> None:
        """Stop it and put it back into the queue. CAUTION: a job that has ended starts again too.

        Raises:
            LaunchError: there is no such job, or it may not be requeued.
        """
        self.control("requeue", job)

    def control(self, verb: str, job: str) -> None:
        """`scontrol VERB JOB`: hold, release, requeue, suspend, resume.

        Raises:
            LaunchError: it was refused.
        """
        _checked([job])
        self._look(["scontrol", *self._clusters(), verb, job])

    def update(self, job: str, **values: str) -> None:
        """`scontrol update` of a job.

        Raises:
            LaunchError: it was refused.
        """
        _checked([job])
        changes = [f"{name}={value}" for name, value in values.items()]
        self._look(["scontrol", *self._clusters(), "update", f"jobid={job}", *changes])

    def _queued(self, argv: list[str], chunk: Sequence[str]) -> list[JobFacts]:
        asked = [*argv, "--states=all"]
        done = self._run([*asked, "--jobs", ",".join(chunk)], look=True)
        if done.code and _NO_SUCH_JOB.search(done.err):
            if len(chunk) == 1:
                return []
            done = self._look(asked)
        elif done.code:
            raise _refused(done)
        listed = states.parse_queue(done.out)
        wanted = {re.split(r"[_+]", job)[0] for job in chunk}
        return [facts for facts in listed if wanted & {str(facts.number), str(facts.array), str(facts.het)}]

    def _look(self, argv: list[str]) -> Done:
        done = self._run(argv, look=True)
        if done.code:
            raise _refused(done)
        return done

    def _run(self, argv: list[str], *, script: str = "", cwd: Path | None = None, look: bool = False) -> Done:
        env = outside(self.environ, keep=self.keep)
        if look:
            env["SLURM_TIME_FORMAT"] = "%s"
        try:
            return shell.call(argv, env, text=script, timeout=self.timeout, cwd=cwd)
        except NotStartedError as error:
            raise NotStartedError(
                f"{argv[0]} is not here", found=error.found, do="work on a login node of the cluster, or mend PATH"
            ) from error
        except LaunchError as error:
            raise LaunchError(
                f"{argv[0]} had not answered after {self.timeout:g} s", found=error.found, do=_ADVICE[0][1]
            ) from error

    def _clusters(self) -> list[str]:
        return ["--clusters", self.cluster] if self.cluster else []


def parse_submitted(out: str, notes: str = "") -> Submitted:
    """The id in sbatch's answer, whichever form it has (B023).

    Raises:
        LaunchError: there is none in it.
    """
    found = _ANSWER.search(out)
    if not found:
        raise LaunchError(
            "sbatch answered without a job id", found=repr(out.strip() or notes.strip()), do="see `worldsize jobs`"
        )
    return Submitted(found["job"], found["a"] or found["b"], notes.strip())


def _refused(done: Done, kind: type[LaunchError] = LaunchError) -> LaunchError:
    said = " ".join((done.err.strip() or done.out.strip()).split())
    advice = next((do for pattern, do in _ADVICE if pattern.search(said)), None)
    what = "cannot reach Slurm" if _UNREACHABLE.search(said) else f"was refused (exit code {done.code})"
    return kind(f"{done.argv[0]} {what}", found=said.rstrip(".") or "no word from it", do=advice)


def _said(command: str, error: LaunchError) -> str:
    found = f": {error.found}" if error.found else ""
    if command == "sacct" and "disabled" in found:
        return "accounting is disabled on this cluster"
    return f"{error.what}{found}"


def _with_name(facts: JobFacts) -> JobFacts:
    """The name of whoever cancelled it, for whom sacct gives a number."""
    if not facts.cancelled_by.isdigit():
        return facts
    try:
        return replace(facts, cancelled_by=pwd.getpwuid(int(facts.cancelled_by)).pw_name)
    except KeyError:
        return facts


def _chunks(jobs: Sequence[str]) -> Iterator[Sequence[str]]:
    unique = list(dict.fromkeys(_checked(jobs)))
    return (unique[at : at + CHUNK] for at in range(0, len(unique), CHUNK))


def _checked(jobs: Sequence[str]) -> Sequence[str]:
    wrong = next((job for job in jobs if not states.is_id(job)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong!r} is no job id", do="give it as Slurm does: 12, 12_3, 16+1")
    return jobs


def _stamp(second: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
