"""Room: one stall, from the first suspicion to its end: what each rank says of it, whom they name, what is done about it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from multiprocessing import process as processes
from typing import TYPE_CHECKING, Any

from worldsize.errors import StallError
from worldsize.runtime import failure, stacks, waiting
from worldsize.runtime.clock import PHASES
from worldsize.train.suspect import Member, Said, Silent, find

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.runtime.board import Board

_VERDICT = "verdict.json"
_BUSY = 0.1
"""Who uses so much of a processor is at work, and does not wait. On a crowded host that is little: then its state tells."""
_MOST_WORKERS = 3


@dataclass(frozen=True, slots=True)
class Known:
    """What every rank knows of a rank since the start."""

    member: Member
    address: stacks.Address
    error_file: str | None


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a stall takes place.

    Attributes:
        everyone: by rank; me: this one.
        thread: the thread that trains, as Python and as the kernel number it.
        board, cuda: what it may wait in.
        folder: where ranks leave what they say and their stacks.
        tick: seconds between two looks.
        settled: seconds within which every rank that can speak has been heard.
        requeue: whether the suspect is ended.
        say: takes a line for a person.
    """

    everyone: list[Known]
    me: Known
    thread: tuple[int, int]
    board: Board | None
    cuda: bool
    folder: Path
    tick: float
    settled: float
    requeue: bool
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the loop of this rank stands."""

    step: int
    phase: int
    seconds: float
    overdue: bool


class Stalled:
    """This rank's part in a stall.

    Args:
        scene: where it takes place.
        now: when it was noticed.
    """

    def __init__(self, scene: Scene, now: float) -> None:
        self._scene, self._began, self._rank = scene, now, scene.me.member.rank
        self._beats: dict[int, tuple[int, float]] = {}
        self._near: dict[int, Silent] = {}
        self._count, self._cpu, self._ran = 0, (now, 0.0), False
        self._workers: tuple[str, ...] | None = None
        self._said_at: float | None = None
        self._judged: float | None = None
        scene.folder.mkdir(parents=True, exist_ok=True)

    def go_on(self, now: float, place: Place) -> None:
        """Say where this rank stands, hear the others, and act once somebody is named."""
        own = self._own(now, place)
        self._write(
            f"rank-{self._rank:04d}.json", {"beat": self._count, "said": own.to_json(), "near": self._told_near()}
        )
        self._count += 1
        if now - self._began < self._scene.settled:
            return
        said, near = self._heard(now)
        said[self._rank] = own
        self._look_around(said)
        if self._rank == min(said) and now - self._began >= self._scene.settled + 2 * self._scene.tick:
            self._judge(place.seconds, said, {**near, **self._near})
        self._act(now)

    def over(self, now: float) -> None:
        """A step was made after all."""
        with contextlib.suppress(OSError):
            (self._scene.folder / f"rank-{self._rank:04d}.json").unlink(missing_ok=True)
            if self._said_at is not None:
                (self._scene.folder / _VERDICT).unlink(missing_ok=True)
        if self._said_at is not None:
            self._tell(f"worldsize: the training goes on, after {now - self._began:.0f} s")

    # --- what this rank says

    def _own(self, now: float, place: Place) -> Said:
        thread, native = self._scene.thread
        known = stacks.facts(self._scene.me.member.pid, native)
        cpu, runs = (known.cpu, known.state == "R") if known else (0.0, False)
        used = (cpu - self._cpu[1]) / max(now - self._cpu[0], 1e-3)
        busy = self._count > 0 and (used > _BUSY or (runs and self._ran))
        self._cpu, self._ran = (now, cpu), runs
        found = waiting.look(thread, self._scene.board)
        waits = found.inside or (bool(found.open) and (self._scene.cuda or not busy))
        if self._workers is None:
            self._workers = self._stacks()
        return Said(
            place.step, PHASES[place.phase], place.seconds, place.overdue, waits,
            found.open, found.begun, found.ranks, found.line, busy, self._workers,
        )  # fmt: skip

    def _stacks(self) -> tuple[str, ...]:
        """Write the stacks of this process and its data workers. Returns those at work, in words."""
        found = []
        with (self._scene.folder / f"rank-{self._rank:04d}.txt").open("w", encoding="utf-8") as file:
            file.write(f"{self._scene.me.member.words}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            for child in sorted(getattr(processes, "_children", ()), key=lambda each: each.pid):
                known = stacks.facts(child.pid)
                if known is not None:
                    text = stacks.taken(child.pid, self._scene.me.address.file, known.state)
                    file.write(f"\n{child.name} (pid {child.pid})\n{text}")
                    found += _at_work(child.pid, known, text)
        return tuple(found[:_MOST_WORKERS])

    def _told_near(self) -> dict[str, dict[str, str]]:
        return {str(rank): asdict(known) for rank, known in self._near.items()}

    # --- what it hears

    def _heard(self, now: float) -> tuple[dict[int, Said], dict[int, Silent]]:
        """What ranks say that still speak, and what they know of those of their hosts that do not."""
        said, near = {}, {}
        for file in self._scene.folder.glob("rank-*.json"):
            rank, body = int(file.stem.partition("-")[2]), self._read(file.name)
            if body is None or rank >= len(self._scene.everyone):
                continue
            if self._beats.get(rank, (-1, 0.0))[0] != body["beat"]:
                self._beats[rank] = (body["beat"], now)
            if now - self._beats[rank][1] <= self._scene.settled:
                said[rank] = Said.from_json(body["said"])
                near.update({int(other): Silent(**known) for other, known in body["near"].items()})
        missing = {rank: near.get(rank, Silent()) for rank in range(len(self._scene.everyone)) if rank not in said}
        return said, {rank: known for rank, known in missing.items() if rank != self._rank}

    def _look_around(self, said: dict[int, Said]) -> None:
        """Of the ranks of a host that speak, the first looks after those that do not."""
        host = self._scene.me.address.host
        here = [each for each in self._scene.everyone if each.address.host == host]
        silent = [each for each in here if each.member.rank not in said]
        self._near = {rank: known for rank, known in self._near.items() if rank not in said}
        if self._rank != min(each.member.rank for each in here if each.member.rank in said):
            return
        for each in silent:
            if each.member.rank not in self._near:
                self._near[each.member.rank] = self._seen(each)

    def _seen(self, other: Known) -> Silent:
        """What the kernel and its own C code tell of a rank of this host; its stacks are written down."""
        known = stacks.facts(other.address.pid)
        if known is None or known.began != other.address.began:
            return Silent("Z")
        text = stacks.taken(other.address.pid, other.address.file, known.state)
        file = self._scene.folder / f"rank-{other.member.rank:04d}.txt"
        file.write_text(f"{other.member.words}\n{text}", encoding="utf-8")
        return Silent(known.state, stacks.line_of(text), known.where)

    # --- what follows

    def _judge(self, seconds: float, said: dict[int, Said], silent: dict[int, Silent]) -> None:
        found = find(said, silent)
        if found is None or (self._said_at is not None and seconds < 2 * self._said_at):
            return
        step = said[found.rank].step if found.rank in said else max(each.step for each in said.values())
        who = "no rank" if found.rank is None else self._scene.everyone[found.rank].member.words
        again = ", for the second time" if self._scene.requeue and step == self._before() else ""
        text = f"{who} has made any progress" if found.rank is None else f"{who} has made no progress"
        line = f"{text} since step {step}{again}: {found.why}; stacks: {self._scene.folder}"
        self._write(
            _VERDICT, {"line": line, "step": step, "rank": found.rank, "by": self._executor(found.rank, said)}
        )
        self._said_at = seconds
        if not self._scene.requeue:
            self._tell(f"worldsize: {line}")

    def _executor(self, rank: int | None, said: dict[int, Said]) -> int:
        """Who ends the suspect: itself, or one of its host, or, where nobody there speaks, whoever judges."""
        if rank is None or rank in said:
            return self._rank if rank is None else rank
        host = self._scene.everyone[rank].address.host
        return min((each for each in said if self._scene.everyone[each].address.host == host), default=self._rank)

    def _before(self) -> int | None:
        """The step of the stall that ended the attempt before this one."""
        attempt = self._scene.folder.parent
        file = attempt.with_name(str(int(attempt.name) - 1)) / self._scene.folder.name / _VERDICT
        try:
            step: int = json.loads(file.read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError):
            return None
        return step

    def _act(self, now: float) -> None:
        verdict = self._read(_VERDICT) if self._scene.requeue else None
        if verdict is None:
            return
        self._judged = self._judged or now
        # Where whoever should act cannot, every rank ends by itself.
        late = now - self._judged > 2 * self._scene.settled
        if verdict["by"] == self._rank or late:
            self._end(verdict["line"], None if late else verdict["rank"])

    def _end(self, line: str, rank: int | None) -> None:
        """End the suspect where it is of this host, else this process: the launcher ends the rest, and may start again."""
        suspect = self._scene.everyone[self._rank if rank is None else rank]
        error, address = StallError(line), suspect.address
        here = address.host == self._scene.me.address.host and suspect is not self._scene.me
        known = stacks.facts(address.pid) if here else None
        if known is None or known.began != address.began:
            failure.end(error)
        failure.say_for(error, suspect.member.rank, suspect.error_file)
        with contextlib.suppress(ProcessLookupError):
            os.kill(address.pid, signal.SIGKILL)
        time.sleep(self._scene.settled)

    def _tell(self, line: str) -> None:
        """To whoever listens: that nobody does any more ends neither the watch nor the training."""
        with contextlib.suppress(OSError, ValueError):
            self._scene.say(line)

    def _write(self, name: str, body: dict[str, Any]) -> None:
        """At once as a whole, for readers."""
        file = self._scene.folder / name
        beside = file.with_name(f"{name}.{self._rank}")
        beside.write_text(json.dumps(body), encoding="utf-8")
        beside.replace(file)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            body: dict[str, Any] = json.loads((self._scene.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return body


def _at_work(pid: int, known: stacks.Facts, text: str) -> list[str]:
    """A data worker in words, unless it waits for work."""
    if known.state in "TtD":
        return [f"data worker {pid} is in state {known.state}"]
    if " in fetch\n" not in text:
        return []
    return [f"data worker {pid} is in {stacks.line_of(text) or 'a dataset'}"]
