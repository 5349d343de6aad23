"""Room: what squeue, sacct and the job's own record say of a job, and what follows from it. Pure, no torch.

Every field that Slurm prints here ends with a character that no name holds, so that blanks, bars and line breaks in names
and comments mean nothing. Text and not JSON: Slurm 22.05 and 24.11 shape their JSON differently.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from worldsize.errors import EXIT_STOPPED, LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from worldsize.launch.endings import Ending

END = "\x1f"
"""Ends every field."""

QUEUE_FIELDS = (
    "JobID", "ArrayJobID", "ArrayTaskID", "HetJobID", "HetJobOffset", "UserName", "State", "Reason", "NumNodes",
    "NodeList", "Partition", "SubmitTime", "StartTime", "EndTime", "TimeLimit", "RestartCnt", "exit_code", "Dependency",
    "PriorityLong", "tres-alloc", "tres-per-node", "NumCPUs", "ReqNodes", "Account", "QOS", "Reservation", "Licenses",
    "Feature", "STDOUT", "STDERR", "WorkDir", "Name", "Comment",
)  # fmt: skip
ACCOUNT_FIELDS = (
    "JobIDRaw", "JobID", "User", "State", "ExitCode", "Reason", "NNodes", "NodeList", "Partition", "Submit", "Start",
    "End", "TimelimitRaw", "Priority", "ReqTRES", "Account", "QOS", "WorkDir", "JobName", "Comment",
)  # fmt: skip
QUEUE_FORMAT = ",".join(f"{name}:{END}" for name in QUEUE_FIELDS)
ACCOUNT_FORMAT = ",".join(ACCOUNT_FIELDS)

UNKNOWN = "UNKNOWN"
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
ACTIVE = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)
ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
        "DEADLINE", "REVOKED", "LAUNCH_FAILED",
    }
)  # fmt: skip

CLOCKS_S = 600
"""How far the clock of whoever submitted may be from the controller's. Ids come again after weeks, not minutes."""

_NOTHING = frozenset(
    {
        "",
        "(null)",
        "N/A",
        "None",
        "NONE",
        "none",
        "Unknown",
        "UNLIMITED",
        "INVALID",
        "Partition_Limit",
        "None assigned",
    }
)
_ID = re.compile(r"(?P<job>[0-9]+)(?:_(?P<task>[0-9]+)|\+(?P<part>[0-9]+)|_\[.*\])?")
_CLUSTER = re.compile(r"\s*(?:CLUSTER: \S+\n)*")
_PATTERN = re.compile(r"%(?P<width>[0-9]*)(?P<letter>[%AajJNnstux])")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What Slurm says of one job, array member or part of a heterogeneous job. Times are seconds since 1970.

    Attributes:
        job: the id as people write it: 12, 12_3 (array member), 16+1 (part).
        number: Slurm's own number, which differs from `job` for members and parts.
        state: Slurm's word, without "by ..."; `cancelled_by` is the user (or user id) behind it.
        limit: seconds; None where there is none, or none is told.
        exit_code: None before the end; `signal` is the one that ended the job, 0 if none did.
        start: for a pending job when Slurm expects it to start, where it does.
        tres: what is asked, as Slurm writes it: cpu=24,mem=12000M,node=3,gres/gpu=6.
        restarts: None where accounting, which does not count them, is the source.
        stdout: the log's path, its patterns (%j ...) filled in.
    """

    job: str
    number: int
    name: str = ""
    user: str = ""
    state: str = UNKNOWN
    reason: str = ""
    nodes: int = 0
    node_list: str = ""
    partition: str = ""
    submit: int | None = None
    start: int | None = None
    end: int | None = None
    limit: int | None = None
    restarts: int | None = None
    exit_code: int | None = None
    signal: int = 0
    dependency: str = ""
    priority: int | None = None
    tres: str = ""
    cpus: int | None = None
    asked_nodes: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    licenses: str = ""
    features: str = ""
    stdout: str = ""
    stderr: str = ""
    work_dir: str = ""
    comment: str = ""
    cancelled_by: str = ""
    array: int | None = None
    task: int | None = None
    het: int | None = None
    part: int | None = None
    source: str = "squeue"

    @property
    def ended(self) -> bool:
        """Whether this incarnation of the job is over."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Listing:
    """What one of Slurm's commands lists; `missing` says in a line why it could not."""

    jobs: tuple[JobFacts, ...] = ()
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """What the job itself wrote down when its training ended, since launchers flatten exit codes.

    Attributes:
        code: the training's own exit code; 75: stopped on request, everything committed; None where it has not said.
        signal: the signal that ended it, 0 if none did.
        line: what failed, in one line.
        step: the newest committed step.
        time: when it was last written to, seconds since 1970.
        restarts: SLURM_RESTART_COUNT of that attempt.
        ending: how it ended, where the job itself found that out.
    """

    code: int | None = None
    signal: int = 0
    line: str = ""
    step: int | None = None
    time: float | None = None
    restarts: int | None = None
    ending: Ending | None = None

    def of(self, facts: JobFacts | None) -> bool:
        """Whether it speaks of this incarnation of the job, as far as can be told."""
        if facts is None:
            return True
        if self.restarts is not None and facts.restarts is not None and self.restarts != facts.restarts:
            return False
        return self.time is None or facts.start is None or not facts.ended or self.time >= facts.start - CLOCKS_S


@dataclass(frozen=True, slots=True)
class Asked:
    """Which job is meant, and when it is asked.

    Attributes:
        now: seconds since 1970.
        submitted: when it was submitted, so that an older job with a recycled id is not taken for it.
        seen: when it was last listed anywhere.
        grace: for how many seconds a job that nobody lists may still turn up.
    """

    job: str
    now: float
    submitted: float | None = None
    seen: float | None = None
    grace: float = 120.0


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a job.

    Attributes:
        name: Slurm's word for its state, or UNKNOWN.
        source: who says so: squeue, sacct, record, or nobody.
        final: it will not change any more: whoever waits need not ask again.
        note: what is missing or contradicts, in one line.
    """

    job: str
    name: str
    source: str
    final: bool
    facts: JobFacts | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"words": words(self)}


def rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    """The records in what Slurm printed, each field ended by `END`.

    Raises:
        LaunchError: the number of fields does not fit.
    """
    fields = text[_CLUSTER.match(text).end() :].split(END)  # type: ignore[union-attr]
    if (len(fields) - 1) % len(names) or fields[-1].strip():
        raise LaunchError(
            f"Slurm printed {len(fields) - 1} fields, which are no records of {len(names)}",
            found=repr(text[:80]),
            do="report this with the version of Slurm",
        )
    every = range(0, len(fields) - 1, len(names))
    return [
        dict(zip(names, [fields[at].lstrip("\n"), *fields[at + 1 : at + len(names)]], strict=True)) for at in every
    ]


def parse_queue(text: str) -> list[JobFacts]:
    """The jobs in what squeue printed in `QUEUE_FORMAT`."""
    return [_from_queue(row) for row in rows(text, QUEUE_FIELDS)]


def parse_accounting(text: str) -> list[JobFacts]:
    """The jobs in what sacct printed in `ACCOUNT_FORMAT`, every incarnation of a requeued one, oldest first."""
    found = [_from_accounting(row) for row in rows(text, ACCOUNT_FIELDS)]
    return sorted(found, key=lambda facts: (facts.submit or 0, facts.start or 0))


def seconds(text: str) -> int | None:
    """Slurm's durations ("1-02:03:04", "30:00", "infinite") in seconds; None where there is no limit."""
    found = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+(?::[0-9]+){0,2})", text)
    if not found:
        return None
    parts = [int(part) for part in found[2].split(":")]
    if found[1]:
        parts += [0] * (3 - len(parts))
        return int(found[1]) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    hours, minutes, rest = ([0, 0, *parts] if len(parts) > 1 else [0, parts[0], 0])[-3:]
    return hours * 3600 + minutes * 60 + rest


def belongs(facts: JobFacts, job: str) -> bool:
    """Whether these are the facts of `job`: the job itself, a member of the array, a part of a heterogeneous job."""
    found = _ID.fullmatch(job)
    if not found:
        return False
    number = int(found["job"])
    if found["task"]:
        return (facts.array, facts.task) == (number, int(found["task"]))
    if found["part"]:
        return (facts.het, facts.part) == (number, int(found["part"]))
    return number in {facts.number, facts.array, facts.het}


def is_id(text: str) -> bool:
    """Whether the text is a job id: 12, 12_3, 16+1."""
    return bool(_ID.fullmatch(text)) and "[" not in text


def gather(
    asked: Asked, queue: Listing, accounting: Listing | None, records: Mapping[str, ExitRecord] | None = None
) -> dict[str, State]:
    """The state of every member or part of a job, in order; of the job itself where it is in one piece.

    Args:
        asked: the job.
        queue: squeue's answer.
        accounting: sacct's, None where it was not asked.
        records: what jobs wrote, by id.
    """
    listed = [*queue.jobs, *(accounting.jobs if accounting else ())]
    names = {facts.job for facts in listed if belongs(facts, asked.job)}
    names |= {name for name in records or {} if name.startswith(f"{asked.job}_")}
    states = {}
    for name in sorted(names, key=_place) or [asked.job]:
        of_name = Asked(name, asked.now, asked.submitted, asked.seen, asked.grace)
        states[name] = merge(queue, accounting, (records or {}).get(name), asked=of_name)
    return states


def merge(queue: Listing, accounting: Listing | None, record: ExitRecord | None, *, asked: Asked) -> State:
    """One job's state: squeue first, then sacct, then what the job itself wrote, then UNKNOWN.

    A job is never called running on the word of accounting, which may be late, or of nobody. An entry older than the
    submission is another job's.
    """
    found = _newest(queue, asked)
    if found is not None:
        return State(asked.job, found.state, "squeue", found.ended, found, queue.missing)
    kept = _newest(accounting, asked) if accounting else None
    if kept is not None and kept.ended:
        return State(asked.job, kept.state, "sacct", queue.missing is None, kept, queue.missing)
    note = _missing(queue, accounting, kept)
    if record is not None and record.code is not None and record.of(kept) and _not_before(record.time, asked):
        name = _recorded(record)
        sure = queue.missing is None or name == "COMPLETED"
        return State(asked.job, name, "record", sure, kept, note)
    since = max(asked.seen or 0.0, asked.submitted or 0.0)
    over = queue.missing is None and asked.now - since > asked.grace
    return State(asked.job, UNKNOWN, "nobody", final=over, facts=kept, note=note)


def summary(states: Iterable[State]) -> str:
    """How many members are in which state: "2 running, 4 pending"."""
    counts: dict[str, int] = {}
    for state in states:
        counts[state.name] = counts.get(state.name, 0) + 1
    return ", ".join(f"{count} {_lower(name)}" for name, count in counts.items())


def words(state: State) -> str:
    """The state for people: "pending: waiting for resources"."""
    facts = state.facts
    detail = _details(state.name, facts) if facts else ""
    if state.name == UNKNOWN:
        detail = "nobody lists it any more" if state.final else "nobody lists it yet"
    if state.source == "record":
        detail = "says the job's own record"
    return f"{_lower(state.name)}: {detail}" if detail else _lower(state.name)


def reason_words(reason: str) -> str:
    """Slurm's reason in words; as Slurm writes it where there are none."""
    first = reason.partition(",")[0]
    for beginning, text in _REASONS.items():
        if first.startswith(beginning):
            return text
    return reason


def path(pattern: str, facts: JobFacts) -> str:
    """A log's path with Slurm's patterns filled in, as far as they can be told; "%N" and the like stay."""
    values = {
        "%": "%",
        "j": str(facts.number),
        "J": str(facts.number),
        "A": str(facts.array or facts.number),
        "a": str(facts.task if facts.task is not None else 4294967294),
        "x": facts.name,
        "u": facts.user,
    }

    def fill(found: re.Match[str]) -> str:
        value = values.get(found["letter"])
        if value is None:
            return found[0]
        return value.zfill(min(int(found["width"] or 0), 10)) if value.isdigit() else value

    return _PATTERN.sub(fill, pattern)


_REASONS = {
    "Resources": "waiting for resources",
    "Priority": "waiting for jobs of higher priority",
    "DependencyNeverSatisfied": "waiting for a job that will never end as asked",
    "Dependency": "waiting for another job",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "ReqNodeNotAvail": "a node it asks for is not available",
    "NodeDown": "a node it asks for is down",
    "JobHeldUser": "held by its owner",
    "JobHeldAdmin": "held by an administrator",
    "JobArrayTaskLimit": "the array runs as many members at once as it was told",
    "BeginTime": "waiting for its begin time",
    "Reservation": "waiting for its reservation",
    "Licenses": "waiting for licences",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "Assoc": "a limit of the account",
    "QOS": "a limit of the QOS",
    "BadConstraints": "no node has what it asks for",
    "Cleaning": "the last attempt is being cleaned up",
    "Prolog": "the nodes are being prepared",
}
"""Beginning of a reason -> words. A longer name stands before its beginning."""


def _from_queue(row: Mapping[str, str]) -> JobFacts:
    number, task = int(row["JobID"]), _number(row["ArrayTaskID"])
    het, part = _number(row["HetJobID"]), _number(row["HetJobOffset"])
    array = int(row["ArrayJobID"]) if row["ArrayTaskID"] not in _NOTHING else None
    state, by = _state(row["State"])
    code, signal = _exit(row["exit_code"]) if state in ENDED else (None, 0)
    facts = JobFacts(
        job=_shown(number, array, row["ArrayTaskID"], het, part),
        number=number,
        state=state,
        cancelled_by=by,
        nodes=_number(row["NumNodes"].partition("-")[0]) or 0,
        submit=_number(row["SubmitTime"]),
        start=_number(row["StartTime"]),
        end=_number(row["EndTime"]),
        limit=seconds(row["TimeLimit"]),
        restarts=_number(row["RestartCnt"]) or 0,
        exit_code=code,
        signal=signal,
        priority=_number(row["PriorityLong"]),
        cpus=_number(row["NumCPUs"]),
        array=array,
        task=task,
        het=het or None,
        part=part if het else None,
        **{name: _text(row[field]) for name, field in _QUEUE_TEXT.items()},
    )
    return _with_paths(facts)


_QUEUE_TEXT = {
    "name": "Name", "user": "UserName", "reason": "Reason", "node_list": "NodeList", "partition": "Partition",
    "dependency": "Dependency", "tres": "tres-alloc", "asked_nodes": "ReqNodes", "account": "Account", "qos": "QOS",
    "reservation": "Reservation", "licenses": "Licenses", "features": "Feature", "stdout": "STDOUT",
    "stderr": "STDERR", "work_dir": "WorkDir", "comment": "Comment",
}  # fmt: skip


def _from_accounting(row: Mapping[str, str]) -> JobFacts:
    shown = _ID.match(row["JobID"])
    state, by = _state(row["State"])
    code, signal = _codes(row["ExitCode"]) if state in ENDED else (None, 0)
    minutes = _number(row["TimelimitRaw"])
    found = shown.groupdict() if shown else {}
    job = int(found.get("job") or row["JobIDRaw"])
    return JobFacts(
        job=row["JobID"],
        number=_number(row["JobIDRaw"]) or job,
        state=state,
        cancelled_by=by,
        nodes=_number(row["NNodes"]) or 0,
        submit=_number(row["Submit"]),
        start=_number(row["Start"]),
        end=_number(row["End"]),
        limit=None if minutes is None else minutes * 60,
        restarts=None,
        cpus=None,
        exit_code=code,
        signal=signal,
        priority=_number(row["Priority"]),
        array=job if found.get("task") else None,
        task=_number(found.get("task") or ""),
        het=job if found.get("part") else None,
        part=_number(found.get("part") or ""),
        source="sacct",
        **{name: _text(row[field]) for name, field in _ACCOUNT_TEXT.items()},
    )


_ACCOUNT_TEXT = {
    "name": "JobName", "user": "User", "reason": "Reason", "node_list": "NodeList", "partition": "Partition",
    "tres": "ReqTRES", "account": "Account", "qos": "QOS", "work_dir": "WorkDir", "comment": "Comment",
}  # fmt: skip


def _with_paths(facts: JobFacts) -> JobFacts:
    return replace(facts, stdout=path(facts.stdout, facts), stderr=path(facts.stderr, facts))


def _shown(number: int, array: int | None, task: str, het: int | None, part: int | None) -> str:
    if array:
        return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
    return f"{het}+{part or 0}" if het else str(number)


def _state(text: str) -> tuple[str, str]:
    name, _, by = text.strip().partition(" by ")
    return name.rstrip("+").upper() or UNKNOWN, by


def _exit(text: str) -> tuple[int | None, int]:
    """A wait status as squeue prints it, one number; newer versions may write "code:signal"."""
    if ":" in text:
        return _codes(text)
    status = _number(text)
    return (None, 0) if status is None else (status >> 8, status & 0x7F)


def _codes(text: str) -> tuple[int | None, int]:
    code, _, signal = text.partition(":")
    return _number(code), _number(signal) or 0


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _text(text: str) -> str:
    return "" if text in _NOTHING else text


def _newest(listing: Listing, asked: Asked) -> JobFacts | None:
    of_job = [facts for facts in listing.jobs if belongs(facts, asked.job) and _not_before(facts.submit, asked)]
    return max(of_job, key=lambda facts: (facts.submit or 0, facts.start or 0), default=None)


def _place(job: str) -> tuple[int, ...]:
    """Of a member or part among the others."""
    return tuple(int(number) for number in re.findall("[0-9]+", job))


def _not_before(when: float | None, asked: Asked) -> bool:
    return when is None or asked.submitted is None or when >= asked.submitted - CLOCKS_S


def _missing(queue: Listing, accounting: Listing | None, kept: JobFacts | None) -> str | None:
    parts = [queue.missing] if queue.missing else []
    if accounting is not None and accounting.missing:
        parts.append(accounting.missing)
    if kept is not None:
        parts.append(f"sacct still says {kept.state}, squeue does not list it: accounting is late")
    elif accounting is not None and not accounting.missing:
        parts.append("sacct does not list it")
    return "; ".join(parts) or None


def _recorded(record: ExitRecord) -> str:
    return "COMPLETED" if record.code == 0 and not record.signal else "FAILED"


def _lower(name: str) -> str:
    return _STATES.get(name, name.lower().replace("_", " "))


_STATES = {
    "TIMEOUT": "ended by its time limit",
    "NODE_FAIL": "ended by a failed node",
    "OUT_OF_MEMORY": "out of memory",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "ended by its deadline",
    "REQUEUED": "to be started again",
    "CONFIGURING": "nodes are being prepared",
}


def _details(name: str, facts: JobFacts) -> str:
    if name in WAITING:
        return reason_words(facts.reason)
    if name == "RUNNING":
        again = f", restarted {facts.restarts} times" if facts.restarts else ""
        return f"on {facts.node_list}{again}" if facts.node_list else ""
    if name == "CANCELLED" and facts.cancelled_by:
        return f"by user {facts.cancelled_by}"
    if name == "FAILED" and facts.signal:
        return f"killed by signal {facts.signal}"
    if name == "FAILED" and facts.exit_code == EXIT_STOPPED:
        return "stopped on request, everything committed (exit code 75)"
    return f"exit code {facts.exit_code}" if name == "FAILED" and facts.exit_code is not None else ""
