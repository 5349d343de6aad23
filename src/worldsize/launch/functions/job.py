"""Room: what a submitted function gives back: a future, whichever way the call runs."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from worldsize.errors import LaunchError
from worldsize.launch.functions import outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from worldsize.launch.functions.outcome import Outcome

R = TypeVar("R")
_TAIL, _LONGEST = 20, 1 << 15


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended, as whoever watched it says.

    Attributes:
        ok: whether it succeeded.
        words: what it was, in words.
        forced: whether it was ended from outside: its ranks had no say.
        attempt: how often it was started before, where that is known.
    """

    ok: bool
    words: str
    forced: bool = False
    attempt: int | None = None


class Job(Future[R], Generic[R]):
    """One call. `result()` is rank 0's value, or raises what the first failing rank raised.

    Attributes:
        job_id: Slurm's id (12, 12_3); "local-..." or "here" without Slurm.
        name: the job's name.
        folder: its own folder; None where it ran in this process.
    """

    def __init__(self, job_id: str = "here", name: str = "", folder: Path | None = None) -> None:
        super().__init__()
        self.job_id, self.name, self.folder = job_id, name, folder
        self.state = "pending"
        self._outcomes: Sequence[Outcome] = ()

    @classmethod
    def done_here(cls, name: str, value: R) -> Job[R]:
        """A call that was made in this process."""
        job = cls(name=name)
        job.state = "completed"
        job.set_result(value)
        return job

    def results(self, timeout: float | None = None) -> list[R]:
        """What every rank returned, by rank.

        Raises:
            TimeoutError: it is not over after `timeout` seconds.
            Exception: as `result`.
            LaunchError: a rank left no value, or one that cannot be loaded.
        """
        first = self.result(timeout)
        if self.folder is None:
            return [first]
        found = {each.rank: each for each in self._outcomes if not each.raised}
        missing = sorted(set(range(self._outcomes[0].world)) - found.keys())
        if missing:
            raise LaunchError(f"{self} has no result of rank {missing[0]}", do=f"see {self.log}")
        folder = self.folder
        return [first, *(outcome.value(folder, found[rank]) for rank in sorted(found) if rank)]

    @property
    def log(self) -> Path | None:
        """What the job printed."""
        return None if self.folder is None else self.folder / f"slurm-{self.job_id}.out"

    def stdout(self) -> str:
        """What it has printed so far."""
        log = self.log
        return log.read_text(encoding="utf-8", errors="replace") if log is not None and log.exists() else ""

    def running(self) -> bool:
        """Whether it runs."""
        return not self.done() and self.state.startswith("running")

    def cancel(self) -> bool:
        """End it. False where it is over already."""
        if self.done():
            return self.cancelled()
        self._end()
        if super().cancel():
            self.set_running_or_notify_cancel()
            self.state = "cancelled"
        return self.cancelled()

    def __repr__(self) -> str:
        return f"job {self.job_id} ({self.name}), {self.state}"

    __str__ = __repr__

    def _end(self) -> None:
        """End what runs."""

    def _left(self, attempt: int | None) -> Sequence[Outcome]:
        assert self.folder is not None
        return outcome.read(self.folder, self.job_id, attempt)

    def _conclude(self, end: End) -> None:
        """Take what the ranks left: the future is done."""
        self.state = end.words
        try:
            self._outcomes = self._left(end.attempt)
            value, error = self._judge(end)
        except (OSError, ValueError, LaunchError) as reason:
            value, error = None, reason
        with suppress(InvalidStateError):
            if error is None:
                self.set_result(value)  # type: ignore[arg-type] # it was this function's
            else:
                self.set_exception(error)

    def _judge(self, end: End) -> tuple[R | None, BaseException | None]:
        assert self.folder is not None
        cause = outcome.root(self._outcomes)
        told = cause is not None and not (cause.follows and (end.forced or len(self._outcomes) < cause.world))
        if told and cause is not None:
            return None, outcome.error(self.folder, cause)
        first = next((each for each in self._outcomes if each.rank == 0 and not each.raised), None)
        if not end.ok or first is None:
            return None, self._without_a_word(end, cause)
        return outcome.value(self.folder, first), None

    def _without_a_word(self, end: End, cause: Outcome | None) -> LaunchError:
        lines = self.stdout()[-_LONGEST:].splitlines()
        said = [line.removeprefix("worldsize: ") for line in lines if line.startswith("worldsize: ")]
        said = [line for line in said if not line.startswith("job ")]
        what = f"{self} and left no result" if end.ok else str(self)
        error = LaunchError(what, found=said[-1] if said else None, do=f"see {self.log}")
        if cause is not None:
            error.add_note(f"\nAs a consequence on {cause.who}: {cause.raised}")
        if lines:
            error.add_note("\nThe end of its log:\n" + "\n".join(lines[-_TAIL:]))
        return error
