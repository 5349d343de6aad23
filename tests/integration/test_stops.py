"""A request to stop, whenever and to whomever: one save, agreed by all, exit code 75, and nothing lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.integration import program
from tests.integration.test_parity import single
from worldsize.checkpoint import manifest
from worldsize.launch import env
from worldsize.launch.shell import Group
from worldsize.testing.nursery import Crew, log_file
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STEPS = 2 * program.STEPS_PER_EPOCH


class Started:
    """A training that takes its time, and what it says."""

    def __init__(self, folder: Path, layout: str, **waits: float) -> None:
        self.folder = folder / "run"
        self.crew = Crew(program.ranks_of(layout), folder / f"logs-{time.monotonic_ns()}")
        self.crew.start(program.linger, self.folder, layout, waits)

    def lines(self, rank: int = 0) -> list[str]:
        """What a rank has printed."""
        file = log_file(self.crew.folder, rank)
        return file.read_text().splitlines() if file.exists() else []

    def until(self, word: str, count: int = 1) -> None:
        """Wait until every rank has said this word so often."""
        end = time.monotonic() + 90
        while any(self.lines(rank).count(word) < count for rank in range(self.crew.size)):
            assert None in self.crew.codes(), self.crew.said()
            assert time.monotonic() < end, self.crew.said()
            time.sleep(0.005)

    def send(self, number: int, *ranks: int) -> None:
        """A signal to these ranks."""
        for rank in ranks:
            os.kill(self.crew.pids[rank], number)

    def stopped(self, within: float = 20.0) -> int:
        """All ranks leave in time with code 75. Returns the step at which they said they stopped."""
        codes = self.crew.wait(within)
        said = self.crew.said()
        self.crew.close()
        assert codes == [75] * self.crew.size, said
        (line,) = [line for line in self.lines() if line.startswith("worldsize: stopped at step")]
        return int(line.split()[4])

    def finished(self) -> None:
        """All ranks end well."""
        codes = self.crew.wait(120)
        said = self.crew.said()
        self.crew.close()
        assert codes == [0] * self.crew.size, said


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, which must be whole."""
    path = manifest.committed(folder)[-1]
    assert manifest.verify(path) == []
    return manifest.step_of(path) or 0


def finish(folder: Path, layout: str) -> Started:
    """Go on to the end, and compare the whole curve with that of an undisturbed run."""
    again = Started(folder, layout)
    again.finished()
    losses = latest(read(again.folder / "metrics.jsonl"), "loss")
    expected = single("fp64", "2ep").losses
    assert sorted(losses) == list(range(STEPS))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-10)
    return again


@pytest.mark.parametrize(
    ("layout", "number", "ranks"),
    [
        ("ddp:2", signal.SIGUSR1, (1,)),
        ("ddp:2", signal.SIGTERM, (0, 1)),
        ("fsdp:3", signal.SIGTERM, (2,)),
        ("fsdp:3", signal.SIGUSR1, (0, 1, 2)),
    ],
)
def test_all_ranks_stop_at_one_step(tmp_path: Path, layout: str, number: int, ranks: tuple[int, ...]) -> None:
    """B042: also where only one of them was asked."""
    run = Started(tmp_path, layout, step=0.2)
    run.until("step", 3)
    run.send(number, *ranks)
    step = run.stopped(within=10)
    assert step == newest(run.folder) >= 3
    finish(tmp_path, layout)


def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    """B041: in warm-up there is nothing to lose, and the code still says 'start me again'."""
    run = Started(tmp_path, "ddp:2", **{"warm-up": 1.5})
    run.until("warm-up")
    run.send(signal.SIGTERM, 0)
    assert run.stopped() == 0
    assert manifest.committed(run.folder) == []
    finish(tmp_path, "ddp:2")


@pytest.mark.parametrize(("layout", "number"), [("ddp:2", signal.SIGUSR1), ("fsdp:2", signal.SIGTERM)])
def test_a_long_evaluation_is_left_in_time_and_done_again_once(tmp_path: Path, layout: str, number: int) -> None:
    """B041: thirty seconds of evaluation, stopped within five; the step before it is committed, not repeated."""
    run = Started(tmp_path, layout, evaluation=1.0)  # thirty batches on each rank
    run.until("evaluation", 2)
    asked = time.monotonic()
    run.send(number, 1)
    assert run.stopped(within=8) == program.STEPS_PER_EPOCH
    assert time.monotonic() - asked < 8
    assert newest(run.folder) == program.STEPS_PER_EPOCH
    again = finish(tmp_path, layout)
    assert [line for line in again.lines() if line.startswith("evaluated")] == ["evaluated 4", "evaluated 9"]
    assert again.lines().count("step") == STEPS - program.STEPS_PER_EPOCH + 1
    assert sorted(latest(read(run.folder / "metrics.jsonl"), "right")) == [4, 9]


def test_an_interrupted_evaluation_may_be_interrupted_again(tmp_path: Path) -> None:
    """The step is counted once, however often what follows it is begun; then never again."""
    for _ in range(2):
        run = Started(tmp_path, "ddp:2", evaluation=1.0)
        run.until("evaluation", 2)
        run.send(signal.SIGTERM, 0)
        assert run.stopped() == program.STEPS_PER_EPOCH
    train = manifest.read(manifest.committed(run.folder)[-1])
    assert (train.step, train.samples) == (program.STEPS_PER_EPOCH, program.LENGTH)
    finish(tmp_path, "ddp:2")


def test_the_last_evaluation_is_repeated_by_the_next_start_only(tmp_path: Path) -> None:
    """B051: a run that is finished has nothing to do, its evaluation included."""
    run = Started(tmp_path, "ddp:2", evaluation=0.1)
    run.until("evaluation", 32)
    run.send(signal.SIGTERM, 0)
    assert run.stopped() == STEPS
    again = finish(tmp_path, "ddp:2")
    assert [line for line in again.lines() if line.startswith("evaluated")] == ["evaluated 9"]
    third = finish(tmp_path, "ddp:2")
    assert "evaluation" not in third.lines()
    assert any("nothing to do" in line for line in third.lines())


def test_a_stop_during_a_save_waits_for_it(tmp_path: Path) -> None:
    """One save is under way in the background: it is finished, and then the last step saved."""
    run = Started(tmp_path, "ddp:2", step=0.1)
    run.until("step", 2)
    folder = run.folder / manifest.FOLDER
    while not (folder.exists() and any(path.suffix == ".tmp" for path in folder.iterdir())):
        assert None in run.crew.codes(), run.crew.said()
    run.send(signal.SIGTERM, 0, 1)
    assert run.stopped() == newest(run.folder)
    finish(tmp_path, "ddp:2")


@pytest.mark.parametrize("pause", [0.0, 0.02, 0.1])
def test_a_second_signal_changes_nothing(tmp_path: Path, pause: float) -> None:
    """Also while the last save is being written."""
    run = Started(tmp_path, "ddp:2", step=0.1)
    run.until("step", 2)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        if None in run.crew.codes():
            run.send(number, 0, 1)
        time.sleep(pause)
    assert run.stopped() == newest(run.folder)
    finish(tmp_path, "ddp:2")


def supervised(folder: Path, waits: Mapping[str, float]) -> tuple[int, str]:
    """The program under `worldsize run`, asked to stop in its first evaluation: the exit code, and what was printed."""
    script, log = folder / "train.py", folder / "log"
    script.write_text(
        f"from pathlib import Path\nfrom tests.integration import program\n"
        f"program.linger(Path({str(folder / 'run')!r}), 'ddp:2', {dict(waits)!r})\n"
    )
    group = Group()
    argv = (sys.executable, "-m", "worldsize", "run", "--nproc-per-node", "2", str(script))
    root = str(program.ROOT)
    child = group.start(
        ("/bin/sh", "-c", 'exec >"$0" 2>&1; exec "$@"', str(log), *argv),
        {**env.read(), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + 90
    while "evaluation" not in (log.read_text() if log.exists() else ""):
        assert child.code is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    child.send(signal.SIGUSR1)
    asked = time.monotonic()
    while child.code is None and time.monotonic() < asked + 20:
        time.sleep(0.02)
    code = child.code
    child.close()
    group.close()
    assert code is not None, log.read_text()
    return code, log.read_text()


def test_the_launcher_hands_the_request_on_and_says_the_code(tmp_path: Path) -> None:
    """B041: SIGUSR1 to `worldsize run` in an evaluation: a checkpoint, and exit code 75."""
    code, said = supervised(tmp_path, {"evaluation": 1.0})
    assert code == 75, said
    assert newest(tmp_path / "run") == program.STEPS_PER_EPOCH
