"""Where each rank's time goes, as it is written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.pools import pool
from tests.train import small
from worldsize.runtime.clock import PHASES, Clock, Spent
from worldsize.runtime.comm import Alone
from worldsize.track.jsonl import read
from worldsize.train.times import Lines, Times, _used, line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import worldsize as ws
    from worldsize.runtime.comm import Pending


def numbers(rank: int) -> list[float]:
    """Those of a rank that took rank + 1 seconds of its own for each of two steps."""
    spread = [float(rank + 1)] * 5
    return [*([float(rank)] * len(PHASES)), *[9.0] * 5, *spread, 2.0, 100.0 * rank, 200.0, 0.5]


def test_a_line_names_the_slowest_rank_and_the_range() -> None:
    """Least, median and most over ranks, and whose the most is."""
    found = line({"step": 7, "seconds": 18.0, "samples": 64}, [numbers(rank) for rank in (2, 0, 1)])
    assert (found["step"], found["steps"], found["ranks"], found["slowest"]) == (7, 2, 3, 0)
    assert found["phases"]["data"] == [0.0, 1.0, 2.0, 0]
    assert found["own"] == [1.0, 2.0, 3.0, 0]
    assert found["by_rank"]["memory"] == [200.0, 0.0, 100.0]
    assert found["by_rank"]["own"][1] == [1.0] * 5


def test_of_many_ranks_only_the_range_is_written() -> None:
    """A line stays short."""
    assert "by_rank" not in line({"seconds": 1.0}, [numbers(rank) for rank in range(65)])


def test_a_cut_line_is_ended(tmp_path: Path) -> None:
    """A kill may have left half of one."""
    (tmp_path / "times.jsonl").write_text('{"step": 1')
    Lines(tmp_path, 3)({"step": 2})
    assert read(tmp_path / "times.jsonl") == [{"step": 2, "attempt": 3}]


class Device(Clock):
    """A clock whose device has finished as many steps, of a second each, as it is told."""

    finished = 0

    def read(self) -> Spent:
        """These steps."""
        found = Spent()
        for _ in range(self.finished):
            found.add([1.0] + [0.0] * (len(PHASES) - 1), 1)
        self.finished = 0
        return found


class Counted(Alone):
    """The first of two ranks, whose other one has always finished a step; how often sums were begun."""

    begun = 0

    def start_sum(self, values: Sequence[float]) -> Pending:
        """One more."""
        self.begun += 1
        return Alone().start_sum([*values[: len(values) // 2], *numbers(0)])


def test_ranks_add_up_though_their_devices_have_not_finished_the_same_steps() -> None:
    """Each time, and the interval goes on until this one's has: nobody can know that of the others."""
    clock, comm = Device(), Counted()
    comm.size = 2
    rows: list[dict[str, Any]] = []
    made = Times(comm, clock, torch.device("cpu"), rows.append, lambda _: None)
    for step, finished in enumerate((1, 0, 0, 3)):
        clock.finished = finished
        made.take(step, 8.0)
        made.flush()
    made.flush(last=True)
    assert comm.begun == 5
    assert [(row["step"], row["samples"]) for row in rows] == [(0, 8), (3, 24)]


def waited(batch: Any) -> dict[str, Any]:
    """A score that takes its time."""
    time.sleep(0.02)
    return {"waited": batch[0][:, 0]}


def slowly(folder: Path) -> None:
    """A training in which rank 1 is slow, data is, and evaluation is."""

    def after(run: ws.Run, step: Any) -> None:
        if run.comm.rank == 1:
            time.sleep(0.03)
        if step.ends_epoch:
            run.evaluate(waited, small.data())

    small.train(folder, after, duration="4ep", saving=small.OFTEN)


def test_a_slow_rank_is_named_and_the_others_are_seen_to_wait(tmp_path: Path) -> None:
    """On two real ranks: all time is accounted for, and each phase has its own."""
    pool(2).run(slowly, tmp_path)
    rows = read(tmp_path / "times.jsonl")
    assert sum(row["steps"] for row in rows) == 12
    assert sum(row["samples"] for row in rows) == 4 * small.LENGTH
    phases = {name: sum(row["phases"][name][2] for row in rows) for name in PHASES}
    own = [sum(row["by_rank"]["own"][rank][4] * row["steps"] for row in rows) / 12 for rank in (0, 1)]
    assert own[1] > own[0] + 0.02
    # An interval of one step may have another slowest rank on a busy machine.
    assert sum(row["steps"] for row in rows if row["slowest"] == 1) > 6
    assert phases["collectives"] > 0.02 * 11
    assert phases["evaluation"] > 0.02 * 4
    assert min(phases.values()) > 0
    whole = sum(row["seconds"] for row in rows)
    assert sum(sum(row["phases"][name][1] for row in rows) for name in PHASES) == pytest.approx(whole, rel=0.5)


def test_a_driver_that_does_not_tell_how_busy_a_gpu_is_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library's errors are of a kind of their own: no library in the container, a part of a GPU."""

    class LibraryNotFoundError(Exception):
        pass

    def tell(_: object) -> int:
        raise LibraryNotFoundError

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"allocated_bytes.all.current": 3})
    monkeypatch.setattr(torch.cuda, "utilization", tell)
    assert _used(torch.device("cuda", 0), 1.0) == (3.0, 0.0, -1.0)
