"""Looking at jobs again and again until they are over."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from worldsize.launch.slurm.known import Desk, Known
from worldsize.launch.slurm.states import ExitRecord, JobFacts, State
from worldsize.launch.slurm.watch import Pace, Watch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Seen:
    """A desk that says this, one look after the other; the last for ever."""

    def __init__(self, *looks: dict[str, Known]) -> None:
        self._looks = list(looks)
        self.asked: list[list[str]] = []

    def look(self, jobs: Sequence[str], *, seen: float | None = None) -> dict[str, list[Known]]:
        """The next one."""
        del seen
        self.asked.append(list(jobs))
        now = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return {job: [now[job]] for job in jobs}


def job(name: str, number: str = "7", code: int | None = None, folder: Path | None = None) -> Known:
    """A job in this state."""
    facts = JobFacts(number, int(number), state=name, exit_code=code)
    record = None if code is None else ExitRecord(code)
    return Known(State(number, name, "squeue", facts.ended, facts), folder, record=record)


def watched(desk: Seen, *jobs: str) -> Watch:
    """To its end, without waiting."""
    watch = Watch(cast("Desk", desk), jobs or ("7",))
    for _ in range(20):
        watch.look()
        if watch.over:
            return watch
    raise AssertionError(desk.asked)


def test_a_job_that_goes_back_into_the_queue_has_not_ended() -> None:
    """Preempted, seen once, is a moment before it waits again; seen twice it is the end."""
    looks = [job("RUNNING"), job("PREEMPTED"), job("PENDING"), job("RUNNING"), job("COMPLETED", code=0)]
    desk = Seen(*({"7": each} for each in looks))
    assert watched(desk).code == 0
    assert len(desk.asked) == 5
    twice = Seen({"7": job("PREEMPTED")})
    assert watched(twice).code != 0
    assert len(twice.asked) == 2


def test_the_job_that_goes_on_is_watched_too(tmp_path: Path) -> None:
    """And its exit code counts, not that of the one before."""
    (tmp_path / "next-7").write_text("9")
    stopped = job("FAILED", code=75, folder=tmp_path)
    desk = Seen(
        {"7": stopped}, {"7": stopped, "9": job("RUNNING", "9")}, {"7": stopped, "9": job("COMPLETED", "9", 0)}
    )
    assert watched(desk).code == 0
    assert desk.asked == [["7"], ["7", "9"], ["7", "9"]]


def test_the_code_is_that_of_the_first_that_failed() -> None:
    """0 only if all have completed."""
    both = {"7": job("COMPLETED", code=0), "8": job("FAILED", "8", 3), "9": job("FAILED", "9", 4)}
    assert watched(Seen(both), "7", "8").code == 3
    assert watched(Seen(both), "9", "8").code == 4


def test_a_cancelled_job_is_no_success() -> None:
    """Slurm gives it code 0."""
    assert watched(Seen({"7": job("CANCELLED", code=None)})).code == 143


def test_only_changes_are_news() -> None:
    """The first look tells everything."""
    watch = Watch(cast("Desk", Seen({"7": job("PENDING")}, {"7": job("PENDING")}, {"7": job("RUNNING")})), ["7"])
    assert [len(watch.look()) for _ in range(3)] == [1, 0, 1]


def test_the_pace() -> None:
    """Slower while nothing happens, to a bound; fast again after news."""
    pace = Pace(1.0, 4.0)
    assert [pace.after(news=False) for _ in range(5)] == [1.5, 2.25, 3.375, 4.0, 4.0]
    assert pace.after(news=True) == 1.0
