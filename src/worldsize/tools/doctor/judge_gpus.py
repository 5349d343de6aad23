"""Room: what is wrong with GPUs, and what their collectives reached against what their links should give. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from worldsize.tools.doctor import nvidia
from worldsize.tools.doctor.finding import Finding, Level, ok
from worldsize.tools.doctor.judge_links import LOW, slow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.tools.doctor.facts import Facts
    from worldsize.tools.doctor.seen import Seen

_HOT, _USED = 85.0, 0.05
_GOOD, _BAD = 0.5, 0.25
"""Of the NVLinks' speed in one direction: an all-reduce reaches some 0.75 of it as bus bandwidth."""
_PCIE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.5}
"""GB/s of one lane in one direction, by generation."""
_PAIR = 2


def health(seen: Seen) -> Iterator[Finding]:
    """What nvidia-smi says of each GPU, and whether the hosts have the same ones."""
    for host, facts in seen.facts.items():
        if "error" in facts.smi:
            do = "reset the GPUs or restart the host; nvidia-smi says the same by hand"
            yield Finding("gpus", Level.PROBLEM, "nvidia-smi fails", (host,), facts.smi["error"], "", do, own=True)
        for gpu in facts.gpus:
            yield from _one(host, gpu)
        yield from _fabric(host, facts)
    yield from _alike(seen)


def _alike(seen: Seen) -> Iterator[Finding]:
    kinds = {host: sorted(gpu.name for gpu in facts.gpus) for host, facts in seen.facts.items()}
    most = max(kinds.values(), key=lambda kind: (list(kinds.values()).count(kind), len(kind)), default=[])
    for host, kind in kinds.items():
        if kind != most:
            do = "leave it out, or ask for nodes of one kind: --constraint; see dmesg for a GPU that is gone"
            what = "other GPUs than the other hosts"
            fewer = len(kind) < len(most)
            level = Level.PROBLEM if fewer else Level.WARNING
            yield Finding("gpus", level, what, (host,), _kinds(kind), _kinds(most), do, own=fewer)
    if most:
        yield ok("gpus", f"{_kinds(most)} a host, driver {', '.join(sorted(_drivers(seen)))}")


def _fabric(host: str, facts: Facts) -> Iterator[Finding]:
    """A GPU with fewer NVLinks than its neighbours; how pairs are connected, where there are pairs."""
    speeds = nvidia.links(facts.smi.get("nvlink", ""))
    most = max(speeds.values(), default=0.0)
    for gpu in facts.gpus if speeds else ():
        speed = speeds.get(gpu.index, 0.0)
        if speed < most:
            do = "have the GPU reset; nvidia-smi nvlink -s and -e show which link is inactive or has errors"
            what = f"GPU {gpu.index}: fewer NVLinks are active than on its neighbours"
            yield Finding("gpus", Level.WARNING, what, (host,), f"{speed:.0f} GB/s", f"{most:.0f} GB/s", do)
    kinds = Counter(kind for (one, other), kind in nvidia.topology(facts.smi.get("topo", "")).items() if one < other)
    if kinds:
        yield ok("topology", f"{host}: {', '.join(f'{count} pairs {kind}' for kind, count in kinds.items())}")


def _one(host: str, gpu: nvidia.Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    if gpu.uncorrected:
        do = "leave the host out; have the GPU reset, and replaced if it comes again"
        yield Finding(
            "gpus", Level.PROBLEM, f"{name}: uncorrectable memory errors", (host,), f"{gpu.uncorrected:.0f} since the start",
            "0", do, own=True,
        )  # fmt: skip
    if gpu.pending:
        do = "have the GPU reset: its bad memory pages are retired then"
        yield Finding("gpus", Level.WARNING, f"{name}: pages wait to be retired", (host,), do=do)
    if gpu.slowed:
        hard = bool(gpu.reasons & nvidia.HARDWARE)
        clock = f"{gpu.clock:.0f} of {gpu.clock_max:.0f} MHz" if gpu.clock and gpu.clock_max else ""
        facts = ", ".join(filter(None, (clock, f"{gpu.temperature:.0f} °C" if gpu.temperature is not None else "")))
        do = (
            "leave the host out; have its cooling and its power looked at"
            if hard
            else "see its power limit and cooling"
        )
        level = Level.PROBLEM if hard else Level.WARNING
        what = f"{name}: slowed down: {', '.join(gpu.slowed)}"
        yield Finding("gpus", level, what, (host,), facts, "no slowdown", do, own=hard)
    elif gpu.temperature is not None and gpu.temperature >= _HOT:
        do = "have the cooling of this host looked at"
        yield Finding(
            "gpus", Level.WARNING, f"{name}: hot", (host,), f"{gpu.temperature:.0f} °C", f"under {_HOT:.0f} °C", do
        )
    if gpu.width and gpu.width_max and gpu.width < gpu.width_max:
        do = "have the card seated anew: lanes are lost"
        what = f"{name}: fewer PCIe lanes than it has"
        yield Finding("gpus", Level.WARNING, what, (host,), f"x{gpu.width:.0f}", f"x{gpu.width_max:.0f}", do)
    if gpu.memory and gpu.memory_used is not None and gpu.memory_used > max(_USED * gpu.memory, 1024):
        do = "see who: nvidia-smi; end what an earlier job left"
        used = f"{gpu.memory_used:.0f} of {gpu.memory:.0f} MiB"
        yield Finding("gpus", Level.WARNING, f"{name}: its memory is used by somebody", (host,), used, "free", do)


def collectives(seen: Seen) -> Iterator[Finding]:
    """All ranks together, then pairs of ranks."""
    found = seen.collectives
    if found is None:
        if seen.silent:
            level = Level.OK if seen.silent in ("one rank alone", "not asked for") else Level.WARNING
            do = "" if level is Level.OK else "mend that first; NCCL_DEBUG=INFO in the environment says more"
            yield Finding("collectives", level, f"not measured: {seen.silent}", do=do)
        return
    yield from _peers(seen, found)
    yield _whole(seen, found)
    yield from _pairs(seen, found)


def _peers(seen: Seen, found: dict[str, Any]) -> Iterator[Finding]:
    for node, pairs in found["peers"].items():
        if pairs:
            do = "see nvidia-smi topo -m; NCCL goes through host memory between them: check IOMMU and ACS settings"
            host = (seen.order[int(node)],)
            yield Finding("collectives", Level.WARNING, "GPUs without peer access", host, f"{pairs}", "all pairs", do)


def _whole(seen: Seen, found: dict[str, Any]) -> Finding:
    whole, should = found["whole"], _should(seen, found)
    said = f"{found['ranks']} ranks, {found['backend']}"
    measured = f"all-reduce {_gb(whole['all_reduce'])}, all-gather {_gb(whole['all_gather'])} bus bandwidth, "
    measured += f"latency {whole['latency'] * 1e6:.0f} us"
    if should is None or whole["all_reduce"] >= _GOOD * should:
        links = "" if should is None else f"; its links: {_gb(should)}"
        return ok("collectives", said, measured + links)
    level = Level.PROBLEM if whole["all_reduce"] < _BAD * should else Level.WARNING
    do = "see nvidia-smi topo -m and nvlink -s, NCCL_DEBUG=INFO for the way it takes, and the pairs below"
    return Finding(
        "collectives", level, f"{said}: far below the links", (), measured, f"{_gb(_GOOD * should)} or more", do
    )


def _should(seen: Seen, found: dict[str, Any]) -> float | None:
    """Bytes/s that the weakest links should give, inside hosts and between them; None where nothing says it."""
    if found["device"] != "cuda":
        return None
    hosts = [seen.facts[name] for name in seen.order]
    several = [bits * 1e9 / 8 for facts in hosts if (bits := _between(facts))] if len(hosts) > 1 else []
    return min([*filter(None, map(_inside, hosts)), *several], default=None)


def _between(facts: Facts) -> float:
    """Gbit/s of a host's cards."""
    return sum(facts.rdma.values()) or max(facts.speeds.values(), default=0) / 1000


def _inside(facts: Facts) -> float | None:
    """Bytes/s of NVLink, or half of PCIe's: an all-reduce passes a card's lanes twice there."""
    if len(facts.gpus) < _PAIR:
        return None
    links = nvidia.links(facts.smi.get("nvlink", ""))
    if links:
        return min(links.values()) * 1e9
    lanes = [_PCIE.get(gpu.pcie or 0, 0.0) * (gpu.width_max or 0.0) for gpu in facts.gpus]
    slowest = min(lanes, default=0.0)
    return slowest * 1e9 / 2 if slowest else None


def _pairs(seen: Seen, found: dict[str, Any]) -> Iterator[Finding]:
    """Inside hosts and between hosts apart: these links are not alike."""
    places = [tuple(place) for place in found["places"]]
    for inside in (True, False):
        rates = {
            (_rank(seen, places[one]), _rank(seen, places[other])): pair["all_reduce"]
            for pair in found["pairs"]
            for one, other in [pair["ranks"]]
            if (places[one][0] == places[other][0]) is inside
        }
        if len(rates) > 1:
            level = Level.PROBLEM if found["device"] == "cuda" else Level.WARNING
            yield from _judged(rates, "inside a host" if inside else "between hosts", level)


def _judged(rates: dict[tuple[str, str], float], where: str, level: Level) -> Iterator[Finding]:
    """A slow pair of hosts without GPUs is a warning: the streams between them, measured again, tell it better."""
    members, pairs, usual = slow(rates)
    weak, weaker, _ = slow(rates, LOW)
    for name in members:
        do = "leave its host out; see nvidia-smi nvlink -s, dmesg, ibstat and ethtool there"
        reached = max(rate for pair, rate in rates.items() if name in pair)
        what = f"slow in every pair {where}: {name}"
        host = (name.partition(" ")[0],)
        yield Finding("collectives", Level.PROBLEM, what, host, _gb(reached), f"about {_gb(usual)}", do, own=True)
    for one, other in pairs:
        do = "see the link between them: nvidia-smi topo -m, the switches between the hosts"
        what = f"slow pair {where}: {one} with {other}"
        hosts = tuple(dict.fromkeys((one.partition(" ")[0], other.partition(" ")[0])))
        yield Finding("collectives", level, what, hosts, _gb(rates[one, other]), f"about {_gb(usual)}", do)
    low = [
        *(name for name in weak if name not in members),
        *(f"{a} with {b}" for a, b in weaker if (a, b) not in pairs),
    ]
    if low and not members and not pairs:
        do = "see whether others use these links now, and measure again"
        what = f"slower than the others {where}: {', '.join(low)}"
        yield Finding("collectives", Level.WARNING, what, (), "", f"about {_gb(usual)}", do)
    if not members and not pairs:
        spread = f"{_gb(min(rates.values()))} to {_gb(max(rates.values()))}"
        yield ok("collectives", f"{len(rates)} pairs {where}", f"all-reduce {spread}")


def _rank(seen: Seen, place: tuple[int, int]) -> str:
    return f"{seen.order[place[0]]} rank {place[1]}"


def _kinds(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _drivers(seen: Seen) -> set[str]:
    return {gpu.driver for facts in seen.facts.values() for gpu in facts.gpus}


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
