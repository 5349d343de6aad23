"""Room: who holds the others up. Pure: from what each rank says, and what the kernel says of those that do not speak.

The rules, in order; the first that names somebody holds:

1. a process that is stopped or has ended;
2. a rank that says nothing: native code holds its interpreter, or its host is gone;
3. a rank that is in no collective. What it does may take as long as its phase is allowed to: until then nobody is named;
4. where all are in collectives: a rank that the others wait for in one that it has not begun, because it left it out, or
   is in another one. Of two that wait for each other, the one that is further in the program;
5. all ranks in the same collective: nobody, and that is said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from worldsize.runtime.waiting import Call

_STATES = {"T": "stopped by a signal (state T)", "t": "stopped by a debugger (state t)", "Z": "ended (state Z)"}
_DEEP = {"D": "waits for a device or a file system (state D{where})"}


@dataclass(frozen=True, slots=True)
class Member:
    """One rank, as far as another one knows it before anything goes wrong."""

    rank: int
    host: str
    pid: int

    @property
    def words(self) -> str:
        """For a person."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank says of itself.

    Attributes:
        step: the last step that it began.
        phase: what it does in it.
        seconds: for how long.
        overdue: whether that is longer than the phase may take.
        waits: whether it is in a collective.
        open, begun: see `Waiting`.
        line: where in the user's program.
        busy: whether it uses a processor.
        workers: data workers, each in words, with where it stands.
    """

    step: int
    phase: str
    seconds: float
    overdue: bool
    waits: bool
    open: tuple[Call, ...] = ()
    begun: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    line: str = ""
    busy: bool = False
    workers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "open": [(call.group, call.number, call.name) for call in self.open]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Said:
        """The inverse of `to_json`."""
        calls = tuple(Call(*each) for each in values["open"])
        return cls(**{**values, "open": calls, "workers": tuple(values["workers"])})


@dataclass(frozen=True, slots=True)
class Silent:
    """What is known of a rank that does not speak.

    Attributes:
        state: the kernel's letter for it; "" where nobody of its host speaks.
        line: where its stacks say it is.
    """

    state: str = ""
    line: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Whom to blame, and why, in words. `rank` is None where nobody is behind the others."""

    rank: int | None
    why: str


def find(said: dict[int, Said], silent: dict[int, Silent]) -> Suspect | None:
    """The suspect; None while there is none yet.

    Args:
        said: by rank, those that speak.
        silent: by rank, the others.
    """
    waiting = {rank: each for rank, each in said.items() if each.waits}
    for rank, known in sorted(silent.items(), key=lambda each: (each[1].state not in _STATES, each[0])):
        return Suspect(rank, _mute(known) + _others(waiting, rank))
    away = sorted((each.step, rank) for rank, each in said.items() if not each.waits)
    if away:
        _, rank = next(((step, rank) for step, rank in away if said[rank].overdue), away[0])
        return Suspect(rank, _doing(said[rank]) + _others(waiting, rank)) if said[rank].overdue else None
    if not any(each.overdue for each in said.values()):
        return None
    return _apart(said)


def _mute(known: Silent) -> str:
    inside = f", in {known.line}" if known.line else ""
    if known.state in _STATES:
        return _STATES[known.state] + inside
    if known.state in _DEEP:
        return _DEEP[known.state].format(where=f", {known.where}" if known.where else "") + inside
    if known.state:
        return f"does not answer: native code holds its interpreter{inside}"
    return "does not answer, nor does any rank of its host"


def _doing(said: Said) -> str:
    inside = f", in {said.line}" if said.line else ""
    if said.phase == "data":
        workers = f": {'; '.join(said.workers)}" if said.workers else ""
        return f"waits for data{workers or inside}"
    how = "runs" if said.busy else "sleeps"
    return f"{how} outside of any collective{inside}"


def _others(waiting: dict[int, Said], rank: int) -> str:
    """Where most of the others wait."""
    places = Counter(_call(each).words for other, each in waiting.items() if other != rank)
    if not places:
        return ""
    (words, count), *more = places.most_common()
    steps = {each.step for other, each in waiting.items() if other != rank}
    which = "the others wait" if not more else f"{count} of the others wait"
    return f"; {which} in {words} of step {max(steps)}"


def _call(said: Said) -> Call:
    return said.open[0] if said.open else Call("?", 0, said.line or "a collective")


def _apart(said: dict[int, Said]) -> Suspect:
    """All wait: for whom?"""
    votes: Counter[int] = Counter()
    for rank, each in said.items():
        votes.update(_missing(rank, each, said))
    calls = {rank: _call(each) for rank, each in said.items()}
    if not votes:
        return _odd(calls, said)
    most = [rank for rank, count in votes.items() if count == max(votes.values())]
    chosen = max(most, key=lambda rank: _far(said[rank]))
    unsure = len({_far(said[rank]) for rank in most}) < len(most)
    waits_for_it = [rank for rank, each in said.items() if chosen in _missing(rank, each, said)]
    missed = calls[waits_for_it[0]]
    own, theirs = _at(said[chosen]), _at(said[waits_for_it[0]])
    also = f"; it may as well be rank {waits_for_it[0]} that has one too many" if unsure else ""
    ranks = ", ".join(map(str, waits_for_it))
    plural = "s" if len(waits_for_it) > 1 else ""
    return Suspect(
        chosen,
        f"never began {missed.words}, in which rank{plural} {ranks} wait{'' if plural else 's'}{theirs}, and is in "
        f"{calls[chosen].words}{own}{also}",
    )


def _odd(calls: dict[int, Call], said: dict[int, Said]) -> Suspect:
    """Nobody left one out: all are in the same, or some are in another under the same number."""
    names = Counter((call.group, call.number, call.name) for call in calls.values())
    if len(names) == 1:
        call = next(iter(calls.values()))
        return Suspect(
            None, f"all {len(said)} ranks are in {call.words}, and none is behind: the network or a device hangs"
        )
    rare = min(calls, key=lambda rank: (names[calls[rank].group, calls[rank].number, calls[rank].name], -rank))
    common = Call(*max(names, key=lambda each: names[each]))
    if names[calls[rare].group, calls[rare].number, calls[rare].name] == names.most_common(1)[0][1]:
        other = next(call for call in calls.values() if call != calls[rare])
        unsure = ": it cannot be told who is wrong"
        return Suspect(rare, f"is in {calls[rare].words}{_at(said[rare])}, others are in {other.words}{unsure}")
    return Suspect(rare, f"is in {calls[rare].words}{_at(said[rare])}, the others are in {common.words}")


def _missing(rank: int, said_by: Said, said: dict[int, Said]) -> list[int]:
    """The ranks that have not begun what this one waits in."""
    call = _call(said_by)
    if call.group not in said_by.begun:
        return []
    of_group = said_by.ranks.get(call.group) or list(said)
    return [
        other
        for other in of_group
        if other != rank and other in said and said[other].begun.get(call.group, 0) < call.number
    ]


def _far(said: Said) -> tuple[int, bool, int]:
    """How far a rank is: by its step, by whether the step is over, by its line in the program."""
    place, _, function = said.line.partition(" in ")
    number = place.rpartition(":")[2]
    return (
        said.step,
        said.open[:1] != () and said.open[0].group == "board",
        int(number) if function and number.isdigit() else 0,
    )


def _at(said: Said) -> str:
    return f" ({said.line})" if said.line else ""
