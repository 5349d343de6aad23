"""Room: why a job waits, or why it is over: a category, the evidence, what to do. Pure; silent where evidence is missing."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from worldsize.launch import failure
from worldsize.launch.endings import Ending
from worldsize.launch.slurm.nodes import duration, when
from worldsize.launch.slurm.states import ACTIVE, ENDED, WAITING, reason_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worldsize.launch.slurm.nodes import NodeFacts, PartitionFacts
    from worldsize.launch.slurm.states import ExitRecord, JobFacts, State

_MOST_NAMED = 5
_LONG_S = 3600
_STUCK = (
    "JobHeld", "JobArrayTaskLimit", "Dependency", "BeginTime", "Partition", "Invalid", "BadConstraints", "QOS", "Assoc",
    "ReqNodeNotAvail",
)  # fmt: skip
"""Reasons of jobs that could not start if they were first."""
_HELD = (
    "JobHeldUser",
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "launch failed requeued held",
    "job requeued in held state",
)
_UNAVAILABLE = re.compile(r"UnavailableNodes:(\S+)")
_DEPENDENCY = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<job>\d+(?:_\d+|_\*)?)(?:\+\d+)?\((?P<state>[^)]*)\)")


@dataclass(frozen=True, slots=True)
class Why:
    """The answer: `category` in a few words, `evidence` line by line, `do` where something can be done."""

    category: str
    evidence: tuple[str, ...] = ()
    do: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Around:
    """What else is known: the cluster's partitions and nodes, and the other jobs in the queue."""

    partitions: Sequence[PartitionFacts] = ()
    nodes: Sequence[NodeFacts] = ()
    jobs: Sequence[JobFacts] = ()

    def partition(self, facts: JobFacts) -> PartitionFacts | None:
        """The job's partition; the first that is known of several."""
        names = facts.partition.split(",")
        return next((partition for partition in self.partitions if partition.name in names), None)

    def nodes_of(self, facts: JobFacts) -> list[NodeFacts]:
        """The nodes that the job could run on."""
        names = set(facts.partition.split(","))
        asked = set(_expanded(facts.asked_nodes))
        only = asked if len(asked) >= max(facts.nodes, 1) else set()
        return [node for node in self.nodes if names & set(node.partitions) and (not only or node.name in only)]


def why_waiting(facts: JobFacts, around: Around) -> Why | None:
    """Why a job waits; None where it does not, or Slurm has not said yet."""
    if facts.state not in WAITING or not facts.reason:
        return None
    for beginning, answer in _PENDING:
        if facts.reason.startswith(beginning):
            return answer(facts, around)
    return Why(reason_words(facts.reason), (f"Slurm's reason: {facts.reason}",))


def why_ended(
    state: State, ending: Ending, record: ExitRecord | None = None, tail: str = "", *, ours: bool = True
) -> Why | None:
    """Why a job is over; None where it is not, or nothing tells.

    Args:
        state: of the job.
        ending: what `classes.classify` makes of it.
        record: what the job itself wrote.
        tail: the end of what its newest attempt printed: its exception is shown where the record has none (B094).
        ours: whether we can start it again.
    """
    line = record.line if record is not None else ""
    if state.name not in ENDED or (ending is Ending.UNKNOWN and not line):
        return None
    evidence = _slurm_says(state, ending)
    # A record that begins with the code was not told by a rank.
    silent = not line or line.startswith("exit code")
    if silent and ending is not Ending.COMPLETED and (cause := failure.from_traceback(tail)):
        line = f"its log: {cause.what}" + (f" ({cause.where})" if cause.where else "")
    evidence += [line] if line else []
    if record is not None and record.step is not None:
        evidence.append(f"committed up to step {record.step}")
    do = _ENDED.get(ending, "").format(
        job=state.job, again=f"worldsize restart {state.job}" if ours else "submit it again"
    )
    if ending is Ending.UNKNOWN:
        return Why("failed", tuple(evidence), f"worldsize logs {state.job}")
    return Why(str(ending), tuple(evidence), do or None)


def _slurm_says(state: State, ending: Ending) -> list[str]:
    facts = state.facts
    if facts is None or not facts.ended:
        return []
    by = f" by user {facts.cancelled_by}" if facts.cancelled_by else ""
    evidence = [f"Slurm's state: {facts.state}{by}"]
    if facts.exit_code or facts.signal:
        signal = f", signal {facts.signal}" if facts.signal else ""
        evidence.append(f"exit code {facts.exit_code}{signal}")
    if ending is Ending.TIME_LIMIT and facts.limit is not None:
        evidence.append(f"its limit was {duration(facts.limit)}")
    if ending is Ending.NODE_FAILURE and facts.node_list:
        evidence.append(f"it ran on {facts.node_list}")
    return evidence


_ENDED = {
    Ending.STOPPED: "to go on: {again}",
    Ending.PREEMPTED: "to go on, unless Slurm puts it back itself: {again}",
    Ending.TIME_LIMIT: "to go on: {again}, with more --time if it committed nothing",
    Ending.NODE_FAILURE: "without that node: {again}, with --exclude; worldsize nodes shows what is known of it",
    Ending.HOST_MEMORY: "ask for more with --mem, or use fewer workers that load data; to go on: {again}",
    Ending.GPU_MEMORY: "use a smaller micro-batch, or shard the model",
    Ending.RENDEZVOUS: "see which node did not come: worldsize logs {job}; then: {again}",
    Ending.HANG: "see what the rank that is named did last: worldsize logs {job}; then: {again}",
    Ending.USER_ERROR: "mend the program; its traceback: worldsize logs {job}",
    Ending.CANCELLED: "to go on: {again}",
}


def _resources(facts: JobFacts, around: Around) -> Why:
    need, own = _need(facts), around.nodes_of(facts)
    holders = [job for job in around.jobs if job.state in ACTIVE and _shares(job, own)]
    holders.sort(key=lambda job: job.end or 1 << 40)
    evidence = _room(facts, own, need) if own and facts.nodes else []
    evidence += [_holder(job) for job in holders[:_MOST_NAMED]]
    if len(holders) > _MOST_NAMED:
        evidence.append(f"and {len(holders) - _MOST_NAMED} other jobs")
    return Why("resources", (*evidence, *_expected(facts)), _smaller(facts, own, need))


def _room(facts: JobFacts, own: Sequence[NodeFacts], need: _Need) -> list[str]:
    """How many of the nodes it may use have what it needs: now, and at all."""
    free = sum(node.usable and _fits(node, need, free=True) for node in own)
    ever = sum(_fits(node, need, free=False) for node in own)
    out = [node.name for node in own if not node.usable]
    lines = [f"needs {facts.nodes} nodes with {_need_words(need)} each; {free} of {len(own)} have that free"]
    lines += [f"{len(out)} of them are out: {_named(out)}"] if out else []
    return lines + ([f"only {ever} of them are large enough at all"] if ever < facts.nodes else [])


def _priority(facts: JobFacts, around: Around) -> Why:
    ahead = sorted((job for job in around.jobs if _ahead(job, facts)), key=lambda job: -(job.priority or 0))
    evidence = [f"{len(ahead)} jobs wait before it in {facts.partition}"] if ahead else []
    evidence += [
        f"{job.job} ({job.name}, {job.user}): {job.nodes} nodes, {reason_words(job.reason)}"
        for job in ahead[:_MOST_NAMED]
    ]
    long = facts.limit is None or facts.limit > _LONG_S
    do = "a shorter --time lets the scheduler fit it in between" if long else None
    return Why("priority", (*evidence, *_expected(facts)), do)


def _ahead(job: JobFacts, facts: JobFacts) -> bool:
    """Whether a job waits for the same partition, could start, and comes first."""
    same = set(facts.partition.split(",")) & set(job.partition.split(","))
    first = facts.priority is not None and (job.priority or 0) > facts.priority
    return bool(same) and first and job.state in WAITING and job.number != facts.number and not _stuck(job)


def _dependency(facts: JobFacts, around: Around) -> Why:
    evidence = []
    for found in _DEPENDENCY.finditer(facts.dependency):
        other = next((job for job in around.jobs if job.job == found["job"] or str(job.number) == found["job"]), None)
        now = f", now {other.state.lower()}" if other else ""
        kind = f"{found['kind']}:" if found["kind"] else ""
        evidence.append(f"{kind}{found['job']} is {found['state']}{now}")
    return Why("dependency", tuple(evidence or _raw(facts)), None)


def _never(facts: JobFacts, around: Around) -> Why:
    told = _dependency(facts, around)
    return Why(
        "dependency that will never be met", told.evidence, f"cancel it: scancel {facts.job}; then submit it again"
    )


def _time_limit(facts: JobFacts, around: Around) -> Why:
    partition = around.partition(facts)
    evidence = [f"asks for {duration(facts.limit)}"]
    if partition is None or partition.max_time is None:
        return Why("time limit of the partition", (*evidence, *_raw(facts)))
    evidence.append(f"{partition.name} allows {duration(partition.max_time)}")
    longer = [other.name for other in around.partitions if other.up and _allows(other, facts)]
    also = f", or use a partition that allows it: {', '.join(longer)}" if longer else ""
    do = f"scontrol update jobid={facts.job} timelimit={duration(partition.max_time)}{also}"
    return Why("time limit of the partition", tuple(evidence), do)


def _node_limit(facts: JobFacts, around: Around) -> Why:
    partition = around.partition(facts)
    evidence = [f"asks for {facts.nodes} nodes"]
    if partition is None:
        return Why("node limit of the partition", (*evidence, *_raw(facts)))
    most = min(partition.total_nodes, partition.max_nodes or partition.total_nodes)
    if facts.nodes > most:
        evidence.append(f"{partition.name} has {partition.total_nodes} nodes and allows {most} a job")
    elif facts.nodes < partition.min_nodes:
        evidence.append(f"{partition.name} wants at least {partition.min_nodes} nodes")
    else:
        up = sum(node.usable for node in around.nodes if partition.name in node.partitions)
        evidence += (
            [f"{up} of the {partition.total_nodes} nodes of {partition.name} take jobs"] if around.nodes else []
        )
    return Why("node limit of the partition", tuple(evidence), f"ask for at most {most} nodes, or another partition")


def _node(facts: JobFacts, around: Around) -> Why:
    named = _UNAVAILABLE.search(facts.reason)
    text = named[1] if named else facts.asked_nodes
    names = set(_expanded(text))
    out = [node for node in around.nodes if node.name in names and not node.usable]
    if not out and not named:
        out = [node for node in around.nodes_of(facts) if not node.usable]
    evidence = [_out(node) for node in out[:_MOST_NAMED]] or (
        [f"not available: {text}"] if text else list(_raw(facts))
    )
    ways = [node.resume for node in out[:_MOST_NAMED] if node.resume]
    do = f"wait, or ask an administrator to run: {'; '.join(ways)}" if ways else None
    if facts.asked_nodes:
        do = f"{do or 'wait'}; or do not ask for {facts.asked_nodes}"
    return Why("a node that is not available", tuple(evidence), do)


def _partition_down(facts: JobFacts, around: Around) -> Why:
    partition = around.partition(facts)
    evidence = (f"{partition.name} is {partition.state}",) if partition else _raw(facts)
    open_ones = [other.name for other in around.partitions if other.up and _allows(other, facts)]
    do = f"use another: scontrol update jobid={facts.job} partition={open_ones[0]}" if open_ones else None
    return Why("the partition takes no jobs", tuple(evidence), do)


def _held(facts: JobFacts, around: Around) -> Why:
    del around
    if facts.reason.startswith("JobHeldUser"):
        return Why("held by its owner", _raw(facts), f"scontrol release {facts.job}")
    if facts.reason.startswith("JobHeldAdmin"):
        return Why(
            "held by an administrator", _raw(facts), f"ask an administrator to run: scontrol release {facts.job}"
        )
    return Why("held after failed starts", _raw(facts), f"see its log, then: scontrol release {facts.job}")


def _limit(facts: JobFacts, around: Around) -> Why:
    qos = facts.reason.startswith("QOS")
    whose = (
        f"QOS {facts.qos}" if qos and facts.qos else f"account {facts.account}" if facts.account else "the account"
    )
    running = [job for job in around.jobs if job.state in ACTIVE and job.user == facts.user]
    same = [job for job in running if (job.qos == facts.qos if qos else job.account == facts.account)]
    evidence = [f"{whose}: {facts.reason}"]
    evidence += (
        [f"{len(same)} jobs of {facts.user} run under it: {_named([job.job for job in same])}"] if same else []
    )
    name = facts.qos if qos else facts.account
    see = f"sacctmgr show {'qos' if qos else 'assoc'} {name}".strip() if name else None
    final = "wait for one of them to end; " if same else ""
    return Why(
        f"a limit of the {'QOS' if qos else 'account'}",
        tuple(evidence),
        f"{final}see the limits with: {see}" if see else None,
    )


def _begin(facts: JobFacts, around: Around) -> Why:
    del around
    evidence = (f"begins at {when(facts.start)} at the earliest",) if facts.start else ()
    if facts.restarts:
        return Why(
            "begin time",
            (*evidence, f"Slurm waits before it starts a requeued job again ({facts.restarts} restarts)"),
        )
    return Why(
        "begin time", evidence or _raw(facts), f"to start earlier: scontrol update jobid={facts.job} starttime=now"
    )


def _reservation(facts: JobFacts, around: Around) -> Why:
    del around
    name = facts.reservation
    evidence = (f"waits for the reservation {name}",) if name else _raw(facts)
    return Why(
        "reservation", evidence, f"see when it begins: scontrol show reservation {name}".strip() if name else None
    )


def _licenses(facts: JobFacts, around: Around) -> Why:
    asked = {part.partition(":")[0] for part in facts.licenses.split(",") if part}
    users = [
        job
        for job in around.jobs
        if job.state in ACTIVE and asked & {part.partition(":")[0] for part in job.licenses.split(",")}
    ]
    evidence = [f"asks for {facts.licenses}"] if facts.licenses else list(_raw(facts))
    evidence += [f"{job.job} ({job.user}) holds {job.licenses}" for job in users[:_MOST_NAMED]]
    return Why("licences", tuple(evidence), "see what is free: scontrol show licenses")


def _array(facts: JobFacts, around: Around) -> Why:
    running = [job.job for job in around.jobs if job.array == facts.array and job.state in ACTIVE]
    evidence = (f"{len(running)} members run: {_named(running)}",) if running else _raw(facts)
    do = f"let more run at once: scontrol update arraytaskthrottle=<n> jobid={facts.array}" if facts.array else None
    return Why("limit of the array", evidence, do)


def _account(facts: JobFacts, around: Around) -> Why:
    del around
    named = f"account {facts.account}" if facts.reason.startswith("InvalidAccount") else f"QOS {facts.qos}"
    return Why(reason_words(facts.reason), (named,), f"see yours: sacctmgr show assoc user={facts.user}")


def _constraints(facts: JobFacts, around: Around) -> Why:
    own = {feature for node in around.nodes_of(facts) for feature in node.features.split(",") if feature}
    evidence = [f"asks for features {facts.features}"] if facts.features else list(_raw(facts))
    evidence += [f"the nodes of {facts.partition} have: {', '.join(sorted(own))}"] if own else []
    return Why("no node has what it asks for", tuple(evidence), "cancel it, and submit it with what the nodes have")


_PENDING: tuple[tuple[str, Callable[[JobFacts, Around], Why]], ...] = (
    ("Resources", _resources),
    ("Priority", _priority),
    ("DependencyNeverSatisfied", _never),
    ("Dependency", _dependency),
    ("PartitionTimeLimit", _time_limit),
    ("PartitionNodeLimit", _node_limit),
    ("PartitionDown", _partition_down),
    ("PartitionInactive", _partition_down),
    ("ReqNodeNotAvail", _node),
    ("NodeDown", _node),
    ("Nodes required for job are DOWN", _node),
    ("InvalidAccount", _account),
    ("InvalidQOS", _account),
    ("JobArrayTaskLimit", _array),
    ("BeginTime", _begin),
    ("Reservation", _reservation),
    ("Licenses", _licenses),
    ("BadConstraints", _constraints),
    ("Assoc", _limit),
    ("QOS", _limit),
    ("MaxMemPerLimit", _limit),
    *((name, _held) for name in _HELD),
)
"""Beginning of Slurm's reason -> who answers. A longer name stands before its beginning."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What one node must give; memory in MiB."""

    cpus: int = 0
    memory: int = 0
    gpus: int = 0


def _need(facts: JobFacts) -> _Need:
    asked = dict(part.partition("=")[::2] for part in facts.tres.split(",") if "=" in part)
    nodes = max(facts.nodes, 1)
    counts = [int(value) if value.isdigit() else 0 for value in (asked.get("cpu", ""), asked.get("gres/gpu", ""))]
    cpus, gpus = (-(-count // nodes) for count in counts)
    return _Need(cpus, -(-_mebibytes(asked.get("mem", "")) // nodes), gpus)


def _mebibytes(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+)([KMGTP]?)", text)
    scale = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
    return int(float(found[1]) * scale[found[2]]) if found else 0


def _fits(node: NodeFacts, need: _Need, *, free: bool) -> bool:
    has = (node.cpus_free, node.memory_free, node.gpus_free) if free else (node.cpus, node.memory, node.gpus)
    return all(have >= wanted for have, wanted in zip(has, (need.cpus, need.memory, need.gpus), strict=True))


def _need_words(need: _Need) -> str:
    parts = [f"{need.cpus} CPUs", f"{need.memory} MiB"] + ([f"{need.gpus} GPUs"] if need.gpus else [])
    return ", ".join(parts)


def _smaller(facts: JobFacts, own: Sequence[NodeFacts], need: _Need) -> str | None:
    ever = sum(_fits(node, need, free=False) for node in own)
    return "ask for less a node, or for fewer nodes: it cannot start as it is" if own and ever < facts.nodes else None


def _shares(job: JobFacts, own: Sequence[NodeFacts]) -> bool:
    names = {node.name for node in own}
    return bool(names & set(_expanded(job.node_list)))


def _holder(job: JobFacts) -> str:
    until = f" until {when(job.end)}" if job.end else ""
    return f"{job.job} ({job.name}, {job.user}) holds {job.node_list}{until}"


def _expected(facts: JobFacts) -> tuple[str, ...]:
    return (f"Slurm expects to start it at {when(facts.start)}",) if facts.start else ()


def _stuck(job: JobFacts) -> bool:
    return job.reason.startswith(_STUCK)


def _allows(partition: PartitionFacts, facts: JobFacts) -> bool:
    """Whether a partition would take the job, by its limits."""
    most = min(partition.total_nodes, partition.max_nodes or partition.total_nodes)
    in_time = partition.max_time is None or (facts.limit is not None and facts.limit <= partition.max_time)
    return in_time and partition.min_nodes <= facts.nodes <= most and partition.name not in facts.partition.split(",")


def _out(node: NodeFacts) -> str:
    said = f': "{node.reason}"' if node.reason else ""
    since = f", since {when(node.since)}" if node.since else ""
    by = f", by {node.reason_user}" if node.reason_user else ""
    return f"{node.name} is {node.words}{said}{by}{since}"


def _raw(facts: JobFacts) -> tuple[str, ...]:
    return (f"Slurm's reason: {facts.reason}",)


def _named(names: Iterable[str]) -> str:
    every = list(names)
    rest = len(every) - _MOST_NAMED
    return ", ".join(every[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _expanded(text: str) -> list[str]:
    from worldsize.errors import WorldError
    from worldsize.runtime.hostlist import expand

    try:
        return expand(text) if text else []
    except WorldError:
        return []
