"""Room: from what was measured to findings: hosts, versions, limits, clocks, names, ports, folders, disks. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from statistics import median, median_high
from typing import TYPE_CHECKING

from worldsize.runtime.network import is_loopback
from worldsize.tools.doctor import judge_gpus, judge_links
from worldsize.tools.doctor.finding import Finding, Level, ok

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.tools.doctor.disk import Written
    from worldsize.tools.doctor.seen import Seen

_FILES, _FILES_MIN = 4096, 256
_SKEW, _SKEW_BAD = 0.5, 5.0
_ROOM = {"run folder": 1024, "temporary files": 512, "shared memory": 128}
"""MiB below which a place is nearly full."""
_DISK_SLOW, _DISK_MIN = 0.2, 20.0
_SEEN_LATE = 1.0
_DRIVER = "driver"
_TWO = 2
"""Of so many hosts nobody knows which one is right."""


def judge(seen: Seen) -> list[Finding]:
    """Every finding."""
    parts = (
        _reach, _versions, _limits, judge_gpus.health, _clocks, _names, _ports, _disks, _share, judge_links.judge,
        judge_gpus.collectives, _unanswered,
    )  # fmt: skip
    return list(chain.from_iterable(part(seen) for part in parts))


def _reach(seen: Seen) -> Iterator[Finding]:
    for host, why in seen.lost.items():
        do = f"see why it does not answer, or leave it out (--exclude={host})"
        yield Finding(
            "hosts", Level.PROBLEM, "did not take part, or not to the end", (host,), why, "an answer", do, own=True
        )
    if not seen.lost:
        yield ok("hosts", f"{len(seen.facts)} answered: {', '.join(seen.facts)}")


def _versions(seen: Seen) -> Iterator[Finding]:
    told = {host: {"python": facts.python, **facts.packages} for host, facts in seen.facts.items()}
    for host, facts in seen.facts.items():
        told[host] |= {_DRIVER: facts.gpus[0].driver} if facts.gpus else {}
    found = [one for name in sorted(set(chain.from_iterable(told.values()))) if (one := _differing(name, told))]
    yield from found
    if not found and told:
        yield ok("versions", ", ".join(f"{name} {version}" for name, version in next(iter(told.values())).items()))


def _differing(name: str, told: dict[str, dict[str, str]]) -> Finding | None:
    versions = {host: values.get(name, "none") for host, values in told.items()}
    usual, count = Counter(versions.values()).most_common(1)[0]
    if count == len(versions):
        return None
    others = tuple(host for host, version in versions.items() if version != usual)
    level = Level.WARNING if name == _DRIVER else Level.PROBLEM
    sure = count > len(versions) / 2
    return Finding(
        "versions",
        level,
        f"another {name} than the other hosts",
        others,
        ", ".join(f"{host}: {versions[host]}" for host in others),
        usual,
        "use one environment on all hosts: a shared folder, an image, or --venv with an archive",
        own=sure and level is Level.PROBLEM,
    )


def _limits(seen: Seen) -> Iterator[Finding]:
    found = [finding for host in seen.facts for finding in _limits_of(host, seen)]
    yield from found
    if not found and seen.facts:
        some = next(iter(seen.facts.values()))
        limit = f", {some.memory_limit} MiB for this process" if some.memory_limit else ""
        yield ok(
            "limits", f"{some.files or 'any number of'} open files, {some.memory} MiB memory{limit}, {some.cpus} CPUs"
        )


def _limits_of(host: str, seen: Seen) -> Iterator[Finding]:
    facts = seen.facts[host]
    if facts.files is not None and facts.files < _FILES:
        level = Level.PROBLEM if facts.files < _FILES_MIN else Level.WARNING
        do = f"ulimit -n {_FILES} in the job's setup; or raise it in /etc/security/limits.conf"
        what = "few files may be open at once: data workers and connections need many"
        own = level is Level.PROBLEM
        yield Finding("limits", level, what, (host,), f"ulimit -n {facts.files}", f"{_FILES} or more", do, own=own)
    if facts.locked is not None and facts.rdma:
        do = "set memlock to unlimited for slurmd or in /etc/security/limits.conf"
        what = f"memory cannot be locked freely, as {', '.join(facts.rdma)} needs"
        yield Finding("limits", Level.WARNING, what, (host,), f"ulimit -l {facts.locked}", "unlimited", do)


def _clocks(seen: Seen) -> Iterator[Finding]:
    if len(seen.clocks) < _TWO:
        return
    middle = median(offset for offset, _ in seen.clocks.values())
    found = []
    for host, (offset, sure) in seen.clocks.items():
        away = offset - middle
        if abs(away) - sure > _SKEW:
            level = Level.PROBLEM if abs(away) - sure > _SKEW_BAD else Level.WARNING
            how = "ahead" if away > 0 else "behind"
            do = "have its time service looked at: chronyc tracking, timedatectl"
            measured = f"{abs(away):.2f} s {how}, to {sure * 1e3:.1f} ms"
            own = level is Level.PROBLEM and len(seen.clocks) > _TWO
            what = "its clock is not that of the other hosts"
            found.append(Finding("clocks", level, what, (host,), measured, f"under {_SKEW} s", do, own=own))
    yield from found
    if not found:
        most = max(abs(offset - middle) for offset, _ in seen.clocks.values())
        yield ok("clocks", "agree", f"at most {most * 1e3:.1f} ms apart from their median")


def _names(seen: Seen) -> Iterator[Finding]:
    wrong: dict[str, dict[str, list[str]]] = {}
    lost: dict[str, list[str]] = {}
    loops: list[str] = []
    owners = {facts.hostname: host for host, facts in seen.facts.items()}
    for viewer, names in seen.names.items():
        for name, found in names.items():
            own = seen.facts[owners[name]].addresses
            if viewer == owners[name] and found and all(map(is_loopback, found)):
                loops.append(viewer)
            elif not found:
                lost.setdefault(viewer, []).append(name)
            elif not set(found) & set(own):
                wrong.setdefault(viewer, {})[name] = found
    yield from (_wrong(viewer, found, seen) for viewer, found in wrong.items())
    yield from (_unknown(viewer, names, seen) for viewer, names in lost.items())
    if loops:
        what = "its own name is loopback: worldsize finds its way around that, other programs tell peers to call themselves"
        do = "give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding("names", Level.WARNING, what, tuple(loops), do=do)
    if seen.names and not wrong and not lost:
        yield ok("names", f"{len(owners)} names mean the same host on every host")


def _wrong(viewer: str, found: dict[str, list[str]], seen: Seen) -> Finding:
    """Whose fault: where most hosts see the same wrong address of a name, that name's entry; else the viewer's table."""
    name, addresses = next(iter(found.items()))
    owner = next(facts for facts in seen.facts.values() if facts.hostname == name)
    real = ", ".join(owner.addresses) or "none"
    told = ", ".join(f"{each} as {' '.join(here)}" for each, here in found.items())
    return Finding(
        "names",
        Level.PROBLEM,
        f"resolves {', '.join(found)} to an address that is not that host's",
        (viewer,),
        told,
        f"{name} as {real}",
        f"mend /etc/hosts or the DNS that {viewer} asks (getent hosts {name}); there: {real.split(',')[0]} {name}",
        own=len(seen.names) > _TWO
        and sum(addresses == each.get(name) for each in seen.names.values()) <= len(seen.names) / 2,
    )


def _unknown(viewer: str, names: list[str], seen: Seen) -> Finding:
    """Over ssh addresses are used, so that names need not be known; a Slurm job's ranks meet by them."""
    level = Level.PROBLEM if seen.slurm else Level.WARNING
    do = f"add the names to /etc/hosts or the DNS that {viewer} asks: getent hosts {names[0]}"
    others = sum(names[0] in [name for name, found in each.items() if not found] for each in seen.names.values())
    own = level is Level.PROBLEM and others <= len(seen.names) / 2
    return Finding("names", level, f"does not know {', '.join(names)}", (viewer,), "no address", "one", do, own=own)


def _ports(seen: Seen) -> Iterator[Finding]:
    if not seen.closed:
        if seen.dialled:
            yield ok("ports", f"{seen.dialled} connections between all hosts, over the ports that ranks meet on")
        return
    pairs = {(one, other) for one, other, _, _ in seen.closed}
    hosts = [host for host in seen.facts if _alone(host, pairs, seen)]
    for host in hosts:
        rest = [entry for entry in seen.closed if host in entry[:2]]
        yield _shut((host,), rest, own=len(seen.facts) > _TWO)
    for pair in sorted(pairs):
        if not set(pair) & set(hosts):
            yield _shut(pair, [entry for entry in seen.closed if entry[:2] == pair], own=False)


def _alone(host: str, pairs: set[tuple[str, str]], seen: Seen) -> bool:
    """Whether all others fail with this host, in one direction at least, while they reach each other."""
    others = [other for other in seen.facts if other != host]
    every = all((other, host) in pairs or (host, other) in pairs for other in others)
    return every and len(others) > 1 and not all(_every(other, pairs, seen) for other in others)


def _every(host: str, pairs: set[tuple[str, str]], seen: Seen) -> bool:
    return all((other, host) in pairs or (host, other) in pairs for other in seen.facts if other != host)


def _shut(where: tuple[str, ...], entries: list[tuple[str, str, int, str]], *, own: bool) -> Finding:
    one, other, port, why = entries[0]
    ports = sorted({entry[2] for entry in entries})
    what = "cannot be reached, or cannot reach others" if len(where) == 1 else f"{one} cannot reach {other}"
    do = f"open ports {ports[0]}-{ports[-1]} between the hosts (nft list ruleset, firewall-cmd); tried: nc -vz {other} {port}"
    measured = f"{len(entries)} connections refused: {one} to {other} port {port}: {why}"
    return Finding("ports", Level.PROBLEM, what, where, measured, "all of them accepted", do, own=own)


def _disks(seen: Seen) -> Iterator[Finding]:
    found = []
    for kind, least in _ROOM.items():
        places = {host: each[kind] for host, each in seen.disks.items() if kind in each}
        speeds = [place.speed for place in places.values() if not place.error]
        usual = median_high(speeds) if speeds else 0.0
        found += [told for host, place in places.items() if (told := _disk(host, kind, place, least, usual))]
        if places and not any(finding.what.startswith(kind) for finding in found):
            free = min(place.free for place in places.values())
            path = next(iter(places.values())).path
            yield ok(
                "disk", f"{kind} {path}", f"{free} MiB free, {min(speeds):.0f} to {max(speeds):.0f} MiB/s with fsync"
            )
    yield from found


def _disk(host: str, kind: str, place: Written, least: int, usual: float) -> Finding | None:
    if place.full or place.files_free == 0:
        do = f"make room in {place.path} on {host} (du -xh {place.path} | sort -h), or give another place"
        measured = f"{place.free} of {place.total} MiB free" + (", no file more" if place.files_free == 0 else "")
        return Finding(
            "disk",
            Level.PROBLEM,
            f"{kind} is full: {place.path}",
            (host,),
            measured,
            f"{least} MiB or more",
            do,
            own=True,
        )
    if place.error:
        do = f"see why {place.path} cannot be written there"
        return Finding(
            "disk",
            Level.PROBLEM,
            f"{kind} cannot be written: {place.path}",
            (host,),
            place.error,
            "a file",
            do,
            own=True,
        )
    if place.free < least:
        do = f"make room in {place.path}" + (
            ", or start the container with more: --shm-size" if "memory" in kind else ""
        )
        free = f"{place.free} of {place.total} MiB free"
        return Finding("disk", Level.WARNING, f"{kind} is nearly full", (host,), free, f"{least} MiB or more", do)
    if place.speed < min(_DISK_SLOW * usual, usual) or place.speed < _DISK_MIN:
        do = "see what else writes there (iostat -x 1), and the health of the disk"
        expected = f"about {usual:.0f} MiB/s, as the others"
        return Finding("disk", Level.WARNING, f"{kind} is slow", (host,), f"{place.speed:.0f} MiB/s", expected, do)
    return None


def _share(seen: Seen) -> Iterator[Finding]:
    shared = seen.shared
    if shared is None:
        return
    found = list(_unseen(seen))
    mend = "use another folder for runs; or mount this one with the defaults of its file system"
    for host in shared.stale:
        what = f"a file that is renamed over another stays the old one there, for {shared.limit:.0f} s"
        found.append(Finding("shared", Level.PROBLEM, what, (host,), "old contents", "new ones", mend, own=True))
    for host, text in shared.broken.items():
        what = "a file that is open loses its contents when another is renamed over it"
        found.append(
            Finding("shared", Level.WARNING, what, (host,), text, "the old contents until it is closed", mend)
        )
    if shared.twice:
        what = "several hosts created one file exclusively: a run folder's owner is not safe here"
        found.append(Finding("shared", Level.PROBLEM, what, (), ", ".join(shared.twice), "exactly one host", mend))
    late = {host: taken for host, taken in shared.slowest.items() if taken > _SEEN_LATE and host not in shared.unseen}
    for host, taken in late.items():
        what = "sees new files of other hosts late"
        do = "lower the attribute cache of the mount (NFS: actimeo=1, lookupcache=positive)"
        found.append(Finding("shared", Level.WARNING, what, (host,), f"{taken:.1f} s", f"{_SEEN_LATE:.0f} s", do))
    yield from found
    if not found:
        slowest = max(shared.slowest.values(), default=0.0)
        yield ok(
            "shared", f"{shared.path}: new files, renames and exclusive creation", f"seen within {slowest:.2f} s"
        )


def _unseen(seen: Seen) -> Iterator[Finding]:
    """A host that sees nothing of the others is apart from them; where most are, the folder is shared by none."""
    shared = seen.shared
    assert shared is not None
    count = len(shared.slowest)
    level = Level.PROBLEM if seen.slurm or seen.shared_asked else Level.WARNING
    measured, mount = f"not within {shared.limit:.0f} s", f"mount {shared.path} as on the other hosts"
    apart = [host for host, others in shared.unseen.items() if len(set(others) - {host}) >= count - 1]
    if len(apart) * 2 > count:
        do = "give a folder that all hosts share: --run-dir"
        yield Finding("shared", level, f"{shared.path} is not one folder on all hosts", (), measured, "all files", do)
        return
    for host, others in shared.unseen.items():
        missed = [other for other in others if host in apart or other not in apart]
        if missed:
            what = f"does not see files of {', '.join(missed)} in {shared.path}"
            own = host in apart and level is Level.PROBLEM
            yield Finding(
                "shared", level, what, (host,), measured, "all files", f"{mount}, or leave {host} out", own=own
            )


def _unanswered(seen: Seen) -> Iterator[Finding]:
    for (host, what), why in seen.failed.items():
        told = seen.shared is not None and host in seen.shared.unseen and what.startswith("share.")
        if what != "collect" and not told:
            do = "see what it says; measure again"
            yield Finding("hosts", Level.WARNING, f"had no answer to {what!r}", (host,), why, "an answer", do)
