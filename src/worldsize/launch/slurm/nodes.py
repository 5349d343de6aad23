"""Room: the cluster as sinfo and scontrol show it, in words: what is free, what is drained, why, and how it comes back."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from worldsize.launch.slurm.states import END, rows, seconds
from worldsize.runtime.hostlist import compress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NODE_FIELDS = (
    "NodeList", "Partition", "StateComplete", "CPUsState", "Memory", "AllocMem", "Gres", "GresUsed", "Features", "User",
    "Timestamp", "Reason",
)  # fmt: skip
NODE_FORMAT = ",".join(f"{name}:{END}" for name in NODE_FIELDS)

_SUFFIXES = {
    "*": "not_responding",
    "~": "powered_down",
    "#": "powering_up",
    "$": "maint",
    "@": "reboot",
    "-": "planned",
}
_BROKEN = {"down", "error", "fail", "failing", "unknown", "future", "not_responding", "no_respond", "invalid_reg"}
_CLOSED = {"drain", "drained", "draining", "maint", "powering_down", "reboot_issued"}
_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,(]+)?:(\d+)")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. Memory is in MiB, `since` in seconds since 1970.

    `state` is Slurm's first word (idle, mixed, allocated, down); `flags` are the others (drain, not_responding ...).
    """

    name: str
    partitions: tuple[str, ...]
    state: str
    flags: tuple[str, ...] = ()
    cpus: int = 0
    cpus_free: int = 0
    memory: int = 0
    memory_free: int = 0
    gpus: int = 0
    gpus_free: int = 0
    features: str = ""
    reason: str = ""
    reason_user: str = ""
    since: int | None = None

    @property
    def broken(self) -> bool:
        """Whether it does not work, for whatever reason."""
        return bool(_BROKEN & {self.state, *self.flags})

    @property
    def closed(self) -> bool:
        """Whether somebody took it out: it starts nothing new."""
        return bool(_CLOSED & {self.state, *self.flags})

    @property
    def usable(self) -> bool:
        """Whether it takes jobs, now or once others have ended."""
        return not self.broken and not self.closed

    @property
    def words(self) -> str:
        """Its state in a word or two."""
        if "not_responding" in self.flags:
            return "not responding"
        if self.broken:
            return "down"
        if self.closed:
            busy = self.state in {"mixed", "allocated", "draining", "completing"}
            return "draining" if busy else "in maintenance" if "maint" in self.flags else "drained"
        if "planned" in self.flags or self.state == "planned":
            return "kept for a waiting job"
        return {"allocated": "full", "mixed": "partly free", "idle": "free"}.get(self.state, self.state)

    @property
    def resume(self) -> str | None:
        """The administrator's command that brings it back; None where nothing is to be done."""
        return None if self.usable else f"scontrol update nodename={self.name} state=resume"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"words": self.words, "usable": self.usable, "resume": self.resume}


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition; None: no limit. Times are in seconds."""

    name: str
    up: bool = True
    state: str = "UP"
    default: bool = False
    max_time: int | None = None
    default_time: int | None = None
    max_nodes: int | None = None
    min_nodes: int = 0
    total_nodes: int = 0
    nodes: str = ""
    tier: int = 1
    preempt: str = "OFF"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def parse_nodes(text: str) -> list[NodeFacts]:
    """The nodes in what `sinfo -N` printed in `NODE_FORMAT`: a line per node and partition becomes one per node."""
    found: dict[str, NodeFacts] = {}
    for row in rows(text, NODE_FIELDS):
        partition = row["Partition"].rstrip("*")
        known = found.get(row["NodeList"])
        if known is None:
            found[row["NodeList"]] = _node(row, partition)
        elif partition not in known.partitions:
            found[row["NodeList"]] = replace(known, partitions=(*known.partitions, partition))
    return list(found.values())


def parse_partitions(text: str) -> list[PartitionFacts]:
    """The partitions in what `scontrol show partition -o` printed."""
    lines = [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines() if line.strip()]
    return [_partition(line) for line in lines if "PartitionName" in line]


def gpus(text: str) -> int:
    """How many GPUs a gres list names: "gpu:a100:4(S:0-1),gpu:v100:2,shard:8" -> 6."""
    return sum(int(count) for count in _GPU.findall(re.sub(r"\([^)]*\)", "", text)))


def report(nodes: Sequence[NodeFacts], partitions: Sequence[PartitionFacts]) -> list[str]:
    """The cluster in lines: every partition, what is free in it, then every node that is out, why, and the way back."""
    lines = [_partition_line(partition, nodes) for partition in partitions]
    out = [node for node in nodes if not node.usable]
    return [*lines, *_out_lines(out)]


def when(second: float) -> str:
    """A time for people, in this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(second))


def duration(length: int | None) -> str:
    """Seconds as Slurm writes them: 1-02:00:00."""
    if length is None:
        return "no limit"
    days, rest = divmod(length, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _node(row: dict[str, str], partition: str) -> NodeFacts:
    state, flags = _state(row["StateComplete"])
    cpus = [int(part) if part.isdigit() else 0 for part in row["CPUsState"].split("/")]
    memory, used = (int(row[name]) if row[name].isdigit() else 0 for name in ("Memory", "AllocMem"))
    total = gpus(row["Gres"])
    known = row["Reason"] not in {"none", "(null)", ""}
    return NodeFacts(
        name=row["NodeList"],
        partitions=(partition,),
        state=state,
        flags=flags,
        cpus=cpus[3] if len(cpus) > 3 else 0,  # noqa: PLR2004 - allocated/idle/other/total
        cpus_free=cpus[1] if len(cpus) > 1 else 0,
        memory=memory,
        memory_free=max(memory - used, 0),
        gpus=total,
        gpus_free=max(total - gpus(row["GresUsed"]), 0),
        features="" if row["Features"] == "(null)" else row["Features"],
        reason=row["Reason"] if known else "",
        reason_user=row["User"] if known else "",
        since=int(row["Timestamp"]) if known and row["Timestamp"].isdigit() else None,
    )


def _state(text: str) -> tuple[str, tuple[str, ...]]:
    state, *flags = text.lower().split("+")
    while state and state[-1] in _SUFFIXES:
        flags.append(_SUFFIXES[state[-1]])
        state = state[:-1]
    return state, tuple(flags)


def _partition(line: dict[str, str]) -> PartitionFacts:
    most = line.get("MaxNodes", "")
    return PartitionFacts(
        name=line["PartitionName"],
        up=line.get("State") == "UP",
        state=line.get("State", ""),
        default=line.get("Default") == "YES",
        max_time=seconds(line.get("MaxTime", "")),
        default_time=seconds(line.get("DefaultTime", "")),
        max_nodes=int(most) if most.isdigit() else None,
        min_nodes=int(line.get("MinNodes", "0")),
        total_nodes=int(line.get("TotalNodes", "0")),
        nodes=line.get("Nodes", ""),
        tier=int(line.get("PriorityTier", "1")),
        preempt=line.get("PreemptMode", ""),
    )


def _partition_line(partition: PartitionFacts, nodes: Sequence[NodeFacts]) -> str:
    own = [node for node in nodes if partition.name in node.partitions]
    counts: dict[str, int] = {}
    for node in own:
        counts[node.words] = counts.get(node.words, 0) + 1
    usable = [node for node in own if node.usable]
    parts = [
        f"{len(own)} nodes",
        ", ".join(f"{count} {word}" for word, count in counts.items()),
        f"{sum(node.cpus_free for node in usable)} of {sum(node.cpus for node in own)} CPUs free",
    ]
    if any(node.gpus for node in own):
        parts.append(f"{sum(node.gpus_free for node in usable)} of {sum(node.gpus for node in own)} GPUs free")
    parts.append("no time limit" if partition.max_time is None else f"at most {duration(partition.max_time)}")
    if partition.max_nodes is not None:
        parts.append(f"at most {partition.max_nodes} nodes a job")
    closed = "" if partition.up else f" ({partition.state.lower()}: starts nothing)"
    mark = " (default)" if partition.default else ""
    return f"{partition.name}{mark}{closed}: {'; '.join(part for part in parts if part)}"


def _out_lines(nodes: Iterable[NodeFacts]) -> list[str]:
    groups: dict[tuple[str, str, str, int | None], list[str]] = {}
    for node in nodes:
        groups.setdefault((node.words, node.reason, node.reason_user, node.since), []).append(node.name)
    lines = []
    for (word, reason, user, since), names in groups.items():
        listed = compress(sorted(names, key=_natural))
        by = f" ({', '.join([*([user] if user else []), *([f'since {when(since)}'] if since else [])])})"
        said = f': "{reason}"' if reason else ", no reason given"
        way = f"scontrol update nodename={listed} state=resume"
        lines.append(f"{listed} {word}{said}{by if by != ' ()' else ''}. An administrator resumes with: {way}")
    return lines


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
