"""Room: what a doctor may have seen, made up for the judges: healthy hosts, to which a test adds what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.tools.doctor.disk import Written
from worldsize.tools.doctor.facts import Facts
from worldsize.tools.doctor.finding import Finding, Level, culprits, problems
from worldsize.tools.doctor.judge import judge
from worldsize.tools.doctor.rounds import tournament
from worldsize.tools.doctor.seen import Link, Seen, Shared

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTS = ("a", "b", "c", "d")
PLACES = ("run folder", "temporary files", "shared memory")
FAST = 1e9


def facts(number: int, name: str) -> Facts:
    """A host's."""
    return Facts(
        hostname=name,
        python="3.12.1",
        packages={"torch": "2.13.0"},
        memory=1000,
        files=65536,
        addresses={f"10.0.0.{number}": "eth0"},
    )


def seen(hosts: tuple[str, ...] = HOSTS, rate: Callable[[str, str], float] = lambda _one, _other: FAST) -> Seen:
    """Healthy hosts; `rate` says how fast the first sends to the second."""
    known = {name: facts(number, name) for number, name in enumerate(hosts, start=1)}
    names = {name: list(each.addresses) for name, each in known.items()}
    pairs = [pair for pairs in tournament(hosts) for pair in pairs]
    return Seen(
        facts=known,
        slurm=True,
        addresses={name: next(iter(each.addresses)) for name, each in known.items()},
        names={viewer: dict(names) for viewer in hosts},
        dialled=10,
        clocks=dict.fromkeys(hosts, (0.0, 1e-4)),
        links=[Link(one, other, rate(one, other), rate(other, one), 1e-4) for one, other in pairs],
        disks={name: {kind: Written(path="/x", free=9999, speed=500.0) for kind in PLACES} for name in hosts},
        shared=Shared(path="/x", slowest=dict.fromkeys(hosts, 0.1)),
    )


def wrong(one: Seen) -> dict[str, str]:
    """Host -> its problem, for hosts that are at fault."""
    return culprits(judge(one))


def named(one: Seen) -> list[tuple[str, tuple[str, ...]]]:
    """Every problem: what was looked at, and where."""
    return [(finding.check, finding.where) for finding in problems(judge(one))]


def warned(one: Seen) -> list[Finding]:
    """Every warning."""
    return [finding for finding in judge(one) if finding.level is Level.WARNING]
