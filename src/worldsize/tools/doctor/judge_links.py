"""Room: which host or pair is slow, from what pairs of them carried. Pure.

A host is slow where even its best partner gets little from it; the median of all hosts' best is what a host should give.
So one slow host does not make its partners look slow. A pair is slow where both of its hosts do better with others.
"""

from __future__ import annotations

from statistics import median_high
from typing import TYPE_CHECKING

from worldsize.tools.doctor.finding import Finding, Level, ok

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from worldsize.tools.doctor.seen import Link, Seen

SLOW, LOW = 1 / 3, 1 / 2
"""Shares of what the others give: below the first it is a problem, below the second a warning."""
_OF_THE_CARD, _STREAM_MAX = 0.5, 1.25e9
"""One stream of bytes reaches half of its card's speed; of a card beyond 10 Gbit/s nobody knows what one stream reaches."""
_LEAST = 1000
"""Mbit/s of a card that does not say its speed."""
_HOPELESS = 0.1
_LATE, _LATE_S = 10.0, 2e-3
_FEW = 2
_MBIT = 1e6 / 8


def best(rates: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Member -> the most that it reached with anybody."""
    found: dict[str, float] = {}
    for pair, rate in rates.items():
        for name in pair:
            found[name] = max(found.get(name, 0.0), rate)
    return found


def slow(
    rates: Mapping[tuple[str, str], float], share: float = SLOW
) -> tuple[list[str], list[tuple[str, str]], float]:
    """Slow members, slow pairs of others, and what should be reached; of two members alone nothing can be said."""
    found = best(rates)
    usual = median_high(sorted(found.values())) if found else 0.0
    if len(found) <= _FEW:
        return [], [], usual
    members = [name for name, rate in found.items() if rate < share * usual]
    pairs = [pair for pair, rate in rates.items() if rate < share * usual and not set(pair) & set(members)]
    return members, pairs, usual


def suspects(rates: Mapping[tuple[str, str], float], most: int = 6) -> list[tuple[str, str]]:
    """Pairs to be measured again: those whose figure would be a finding, of each slow member its best ones first."""
    members, pairs, _ = slow(rates, LOW)
    theirs = sorted((pair for pair in rates if set(pair) & set(members)), key=lambda pair: -rates[pair])
    return [*theirs[: 2 * len(members)], *pairs][:most]


def judge(seen: Seen) -> Iterator[Finding]:
    """What is to be said of the streams between hosts."""
    if not seen.links:
        return
    rates = rates_of(seen.links)
    members, pairs, usual = slow(rates)
    low, lowish, _ = slow(rates, LOW)
    found = [_slow_host(name, seen.links, usual) for name in members]
    found += [_pair(*pair, rates[pair], usual, Level.PROBLEM) for pair in pairs]
    found += [_weak(name, best(rates)[name], usual) for name in low if name not in members]
    found += [_pair(*pair, rates[pair], usual, Level.WARNING) for pair in lowish if _new(pair, pairs, members)]
    named = {name for finding in found for name in finding.where}
    rest = [link for link in seen.links if not named & {link.one, link.other}]
    found += [told for link in rest if (told := _one_way(link) or _card(link, seen))]
    found += _late(seen.links)
    yield from found
    if not any(finding.level is Level.PROBLEM for finding in found):
        some = "" if seen.every_pair else ", of some pairs: there was no time for all"
        yield ok(
            "network", f"{len(rates)} pairs{some}", f"{_words(min(rates.values()))} to {_words(max(rates.values()))}"
        )


def rates_of(links: Sequence[Link]) -> dict[tuple[str, str], float]:
    """Pair -> its slower direction."""
    return {(link.one, link.other): link.rate for link in links}


def _new(pair: tuple[str, str], pairs: Sequence[tuple[str, str]], members: Sequence[str]) -> bool:
    return pair not in pairs and not set(pair) & set(members)


def _slow_host(name: str, links: Sequence[Link], usual: float) -> Finding:
    sent = max(link.there if link.one == name else link.back for link in links if name in (link.one, link.other))
    got = max(link.back if link.one == name else link.there for link in links if name in (link.one, link.other))
    how = (
        "sends" if sent < SLOW * usual <= got else "receives" if got < SLOW * usual <= sent else "sends and receives"
    )
    return Finding(
        "network",
        Level.PROBLEM,
        f"slow host: it {how} at a fraction of the others' speed, whoever the partner is",
        (name,),
        measured=f"sends {_words(sent)}, receives {_words(got)} at best",
        expected=f"about {_words(usual)}, as the other hosts",
        do=f"leave it out (--exclude={name}); have its cable, port and card looked at: ethtool, ip -s link, tc qdisc show",
        own=True,
    )


def _weak(name: str, rate: float, usual: float) -> Finding:
    do = "see whether other jobs use its network or its CPUs now, and measure again"
    return Finding(
        "network", Level.WARNING, "slower than the others", (name,), _words(rate), f"about {_words(usual)}", do
    )


def _pair(one: str, other: str, rate: float, usual: float, level: Level) -> Finding:
    return Finding(
        "network",
        level,
        "slow pair: with others each of them is faster",
        (one, other),
        measured=_words(rate),
        expected=f"about {_words(usual)}, as other pairs",
        do="have the switches between them looked at; ask for nodes of one switch: --extra=--switches=1",
    )


def _one_way(link: Link) -> Finding | None:
    """One direction tells something even of two hosts alone, but not which of them it is."""
    if link.rate >= SLOW * max(link.there, link.back):
        return None
    sender, getter = (link.one, link.other) if link.there < link.back else (link.other, link.one)
    return Finding(
        "network",
        Level.PROBLEM,
        f"slow in one direction: from {sender} to {getter}",
        (sender, getter),
        measured=_words(link.rate),
        expected=f"about {_words(max(link.there, link.back))}, as the other way",
        do=f"look at how {sender} sends and {getter} receives: ethtool, ip -s link; a third host would tell which",
    )


def _card(link: Link, seen: Seen) -> Finding | None:
    """Against what the slower of the two cards should give."""
    cards = [speed for name in (link.one, link.other) if (speed := _speed(seen, name))]
    should = min(min(cards, default=_LEAST) * _MBIT, _STREAM_MAX) * _OF_THE_CARD
    if link.rate >= should:
        return None
    level = Level.PROBLEM if link.rate < _HOPELESS * should else Level.WARNING
    do = "see whether the cards run at their speed (ethtool), and whether other jobs use them now"
    return Finding(
        "network",
        level,
        "slow for a network of hosts that train together",
        (link.one, link.other),
        _words(link.rate),
        f"{_words(should)} or more",
        do,
    )


def _speed(seen: Seen, name: str) -> int | None:
    facts = seen.facts.get(name)
    return None if facts is None else facts.speeds.get(facts.addresses.get(seen.addresses.get(name, ""), ""))


def _late(links: Sequence[Link]) -> list[Finding]:
    trips = {(link.one, link.other): 1 / max(link.trip, 1e-9) for link in links}
    quickest = {name: 1 / rate for name, rate in best(trips).items()}
    usual = sorted(quickest.values())[(len(quickest) - 1) // 2]
    return [
        Finding(
            "network", Level.WARNING, "answers late", (name,), f"{trip * 1e3:.1f} ms there and back",
            f"about {usual * 1e3:.2f} ms, as the other hosts", "see whether its CPUs are busy, or its way is longer",
        )
        for name, trip in quickest.items()
        if trip > _LATE * usual and trip > _LATE_S
    ]  # fmt: skip


def _words(rate: float) -> str:
    """Bytes/s for people."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"  # noqa: PLR2004 - the units themselves
