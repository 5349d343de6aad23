"""Room: the examination: what is asked of the hosts, in which order, and for how long at most. It judges nothing."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.tools.doctor.disk import Written
from worldsize.tools.doctor.facts import Facts
from worldsize.tools.doctor.judge_links import rates_of, suspects
from worldsize.tools.doctor.rounds import tournament
from worldsize.tools.doctor.seen import Link, Seen, Shared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worldsize.tools.doctor.hub import Hub

PLACES = ("run folder", "temporary files", "shared memory")
_STATIC_PORT = 29500
_OWN_PORTS = range(15000, 30000)
_NAMES_S, _DIAL_S, _FACTS_S = 10.0, 3.0, 70.0
_EXCHANGES = 8
_CLAIMS = 4
_AGAIN, _LOOKS, _LONGER_S = 6, 2, 0.5
"""How many pairs that seem slow are measured again, how often, and for how long at least: a busy host seems slow too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each part may take, in seconds, and how much is written, in MiB.

    Attributes:
        stream: one direction of one pair; pairs: all pairs of streams together.
        write: for each place, and at most `mebibytes` of it.
        share: until a file of another host must be seen.
        collective: one measurement of collectives; collectives: all of them, the import of torch included.
    """

    stream: float = 1.0
    pairs: float = 60.0
    write: float = 5.0
    mebibytes: int = 48
    share: float = 5.0
    collective: float = 0.5
    collectives: float = 240.0

    def total(self, *, torch: bool) -> float:
        """Seconds for everything at most, once the agents are there."""
        again = _AGAIN * _LOOKS * 2 * (max(self.stream, _LONGER_S) + 0.2)
        parts = (_FACTS_S, _NAMES_S, 2 * _DIAL_S, self.pairs, again, 3 * self.write, 3 * self.share)
        return sum(parts) + (self.collectives if torch else 0.0)

    @property
    def one(self) -> float:
        """A pair, both directions, pings included."""
        return 2 * (self.stream + 0.2)


QUICK = Limits(stream=0.2, pairs=15.0, write=2.0, mebibytes=16, collective=0.1, collectives=90.0)


class Examination:
    """Of the hosts of a hub."""

    def __init__(self, hub: Hub, limits: Limits, seen: Seen) -> None:
        self._hub, self._limits, self.seen = hub, limits, seen

    def facts(self) -> None:
        """What each host is."""
        found = self._hub.each("facts", _FACTS_S)
        self.seen.facts = {name: Facts.of(values) for name, values in found.items()}
        self.seen.addresses = {name: host.address for name, host in self._hub.hosts.items()}

    def rest(self, run_dir: str, *, torch: bool) -> Seen:
        """Everything else; what is lost on the way is missing."""
        self._clocks()
        self._disks(run_dir)
        for part in (self._names, self._ports, lambda: self._share(run_dir), self._links):
            if len(self._hub.hosts) > 1:
                part()
        if torch and self._hub.hosts:
            self._collectives()
        self.seen.lost |= self._hub.lost
        self.seen.failed |= self._hub.failed
        return self.seen

    def _clocks(self) -> None:
        for name in list(self._hub.hosts):
            found = self._hub.offset(name, _EXCHANGES)
            if found is not None:
                self.seen.clocks[name] = found

    def _names(self) -> None:
        names = sorted({facts.hostname for facts in self.seen.facts.values()})
        self.seen.names = self._hub.each("resolve", _NAMES_S, names=names, limit=_NAMES_S)

    def _ports(self) -> None:
        low = max(facts.ephemeral[0] for facts in self.seen.facts.values())
        high = min(facts.ephemeral[1] for facts in self.seen.facts.values())
        some = {low, (low + high) // 2, high, random.randrange(low, max(high, low + 1)), random.choice(_OWN_PORTS)}
        opened = self._hub.each("listen", _DIAL_S, wanted=sorted({_STATIC_PORT, *some}))
        targets = {
            name: [
                (other, self._hub.hosts[other].address, port)
                for other, found in opened.items()
                if other != name and other in self._hub.hosts
                for port in found
            ]
            for name in opened
        }
        shut = self._hub.each(
            "dial", 3 * _DIAL_S, {name: {"targets": each} for name, each in targets.items()}, limit=_DIAL_S
        )
        self._hub.each("listen", _DIAL_S, wanted=[])
        self.seen.dialled = sum(map(len, targets.values()))
        self.seen.closed = [(name, *each) for name, found in shut.items() for each in found]

    def _disks(self, run_dir: str) -> None:
        temporary = self._hub.each("temporary", _DIAL_S)
        limits = {"mebibytes": self._limits.mebibytes, "limit": self._limits.write}
        for kind, fixed in zip(PLACES, (run_dir, None, "/dev/shm"), strict=True):  # noqa: S108 - where workers share memory
            paths = {name: {"path": fixed or temporary.get(name, "")} for name in self._hub.hosts}
            found = self._hub.each("write", 4 * self._limits.write, paths, **limits)
            for name, values in found.items():
                self.seen.disks.setdefault(name, {})[kind] = Written(**values)

    def _share(self, run_dir: str) -> None:
        first = next(iter(self._hub.hosts))
        made = self._hub.each("share.begin", _DIAL_S, {first: {}}, path=run_dir)
        if first not in made:
            return
        folder, limit = str(made[first]), self._limits.share
        try:
            self._watch(folder, first, limit)
        finally:
            self._hub.each("share.end", _DIAL_S, {first: {}}, folder=folder)

    def _watch(self, folder: str, first: str, limit: float) -> None:
        hub, hosts = self._hub, list(self._hub.hosts)
        files = {name: f"host{number}" for number, name in enumerate(hosts)}
        listed: dict[str, Any] = {"folder": folder, "names": list(files.values()), "text": "here"}
        hub.each("share.look", limit, limit=0.0, **listed)  # a client remembers that a file was not there
        hub.each("share.put", limit, {first: {}}, folder=folder, name="one", text="old")
        hub.each(
            "share.put", limit, {name: {"name": file} for name, file in files.items()}, folder=folder, text="here"
        )
        looks = hub.each("share.look", limit, limit=limit, **listed)
        unseen = {
            name: [other for other in hosts if found[files[other]] is None]
            for name, found in looks.items()
            if None in found.values()
        }
        seen = [name for name, found in looks.items() if found[files[first]] is not None]
        others: dict[str, dict[str, Any]] = {name: {} for name in seen if name != first}
        hub.each("share.hold", limit, others, folder=folder, name="one")
        hub.each("share.put", limit, {first: {}}, folder=folder, name="one", text="new")
        fresh = hub.each("share.look", limit, others, folder=folder, names=["one"], text="new", limit=limit)
        kept = hub.each("share.held", limit, others, name="one")
        claims = [f"claim{number}" for number in range(_CLAIMS)]
        won = hub.each("share.claim", limit, {name: {} for name in seen}, folder=folder, names=claims)
        winners = [name for each in won.values() for name in each]
        self.seen.shared = Shared(
            path=folder.rpartition("/")[0],
            unseen=unseen,
            slowest={
                name: max(map(float, filter(None, found.values())), default=0.0) for name, found in looks.items()
            },
            stale=[name for name, found in fresh.items() if found["one"] is None],
            broken={name: text for name, text in kept.items() if text != "old"},
            twice=[name for name in claims if winners.count(name) != 1],
            limit=limit,
        )

    def _links(self) -> None:
        end = time.monotonic() + self._limits.pairs
        for number, pairs in enumerate(tournament(list(self._hub.hosts))):
            if time.monotonic() + self._limits.one > end and number > 1:
                self.seen.every_pair = False
                break
            self.seen.links += self._measured(pairs, self._limits.stream)
        for _ in range(_LOOKS):
            for pair in suspects(rates_of(self.seen.links), _AGAIN):
                self._again(*pair)

    def _again(self, one: str, other: str) -> None:
        """Alone, a pair that seemed slow: the better of both measurements counts."""
        for link in self._measured([(one, other)], max(self._limits.stream, _LONGER_S)):
            old = next(each for each in self.seen.links if (each.one, each.other) == (one, other))
            best = Link(one, other, max(old.there, link.there), max(old.back, link.back), min(old.trip, link.trip))
            self.seen.links[self.seen.links.index(old)] = best

    def _measured(self, pairs: Iterable[tuple[str, str]], seconds: float) -> list[Link]:
        """Pairs at the same time; in each, one direction after the other."""
        pairs = [pair for pair in pairs if all(name in self._hub.hosts for name in pair)]
        limit = seconds + 15.0
        meters = {name: self._meter(name) for pair in pairs for name in pair}
        back = self._hub.each("measure", limit, {one: meters[other] for one, other in pairs}, seconds=seconds)
        there = self._hub.each("measure", limit, {other: meters[one] for one, other in pairs}, seconds=seconds)
        return [
            Link(one, other, there[other][0], back[one][0], min(there[other][1], back[one][1]))
            for one, other in pairs
            if one in back and other in there
        ]

    def _meter(self, name: str) -> dict[str, Any]:
        host = self._hub.hosts[name]
        return {"address": host.address, "port": host.meter}

    def _collectives(self) -> None:
        order = [name for name in self._hub.hosts if name in self.seen.facts]
        address = self._hub.hosts[order[0]].address
        without = [name for name in order if "torch" not in self.seen.facts[name].packages]
        ranks = {name: self.seen.facts[name].ranks for name in order}
        if without or sum(ranks.values()) < 2:  # noqa: PLR2004 - alone there is nothing to collect
            self.seen.silent = f"no torch on {', '.join(without)}" if without else "one rank alone"
            return
        port = self._hub.each("port", _DIAL_S, {order[0]: {}}).get(order[0])
        same = {"nodes": len(order), "address": address, "port": port, "seconds": self._limits.collective}
        meetings = {
            name: {"meeting": {**same, "node": number, "ranks": ranks[name]}} for number, name in enumerate(order)
        }
        limit = self._limits.collectives
        before = set(self._hub.failed)
        found = self._hub.each("collect", limit, meetings, limit=limit)
        self.seen.order, self.seen.collectives = order, found.get(order[0]) or None
        wrong = {host: why for (host, what), why in self._hub.failed.items() if (host, what) not in before}
        if not self.seen.collectives:
            self.seen.silent = next((f"{host}: {why}" for host, why in wrong.items()), "no result")
