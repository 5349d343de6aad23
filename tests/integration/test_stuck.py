"""A rank that gets stuck: who it is, where, and what holds the others, is said in time; the launcher starts again once."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.integration import stuck
from tests.launch import commands
from tests.pools import pool
from tests.train import small
from worldsize.runtime import env
from worldsize.testing.nursery import Crew
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHORT = "floor=2,first=20,data=4,save=4,evaluation=4"
AFTER = {
    "stopped": "stopped by a signal (state T); the others wait in all_reduce",
    "spinning": "runs outside of any collective, in stuck.py:{spinning} in spinning; the others wait in all_reduce",
    "holding": "does not answer: native code holds its interpreter, in stuck.py:{holding} in holding; the others wait",
    "sleeping": "sleeps outside of any collective, in stuck.py:{sleeping} in sleeping; the others wait in all_reduce",
    "worker": "waits for data: data worker {worker} is in stuck.py:{sleeping} in sleeping; the others wait in all_reduce",
    "skipped": "never began all_reduce (1 of group ",
}
QUICK = {"worker": ",first=8"}
"""Its data is missing in the first steps already."""
launched = pytest.mark.parametrize(
    "how", [how if how == "stopped" else pytest.param(how, marks=pytest.mark.matrix) for how in AFTER]
)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Nothing that a test started outlives it, however it was stopped."""
    yield
    for process in commands.STARTED:
        process.kill()
        process.wait()
    commands.STARTED.clear()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last loss of the training that never stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    pool(1).run(stuck.main, str(folder / "run"), "never")
    return last(folder / "run")


def last(run: Path) -> float:
    """The loss of the last step."""
    return latest(read(run / "metrics.jsonl"), "loss")[stuck.STEPS - 1]


def expected(how: str, folder: Path) -> str:
    """What must be said of it: with the lines of the program that hangs."""
    lines = {name: call.__code__.co_firstlineno + 2 for name, call in stuck.HOW.items()}
    file = folder / "hung-0"
    return AFTER[how].format(**{**lines, "worker": file.read_text() if file.exists() else ""})


@pytest.mark.parametrize(
    "how",
    [
        "holding",
        "worker",
        "skipped",
        *(pytest.param(how, marks=pytest.mark.matrix) for how in ("stopped", "spinning", "sleeping")),
    ],
)
def test_the_right_rank_is_named_and_ended(tmp_path: Path, how: str) -> None:
    """The suspect is ended with the one line, whoever started the ranks; stacks of all are there."""
    crew = Crew(2, tmp_path / "logs")
    began = time.monotonic()
    crew.start(stuck.main, str(tmp_path / "run"), how, json.dumps({"stall": f"requeue,{SHORT}{QUICK.get(how, '')}"}))
    codes = crew.wait(60)
    said, took = crew.said(), time.monotonic() - began
    crew.close()
    assert None not in codes, said
    assert f"rank 1 ({os.uname().nodename}, pid {crew.pids[1]}) has made no progress since step " in said
    assert expected(how, tmp_path) in said, (took, said)
    stall = tmp_path / "run" / "attempts" / "0" / "stall"
    assert f"stacks: {stall}" in said
    assert (stall / "rank-0000.txt").stat().st_size > 200
    seen = (stall / "rank-0001.txt").read_text()
    assert "stuck.py" in seen or "state T" in seen, seen


def unheard(what: str, run: Path, how: str, settings: str) -> None:
    """A training that gets stuck where something cannot be written; who speaks of its steps can print."""
    if what == "error file" or env.read()["RANK"] == "1":
        small.spoil(what, run.parent)
    stuck.main(str(run), how, settings)


@pytest.mark.parametrize(
    ("how", "what", "code"),
    [("stopped", "error file", -signal.SIGKILL), ("spinning", "error file", 1), ("spinning", "both streams", 1)],
)
def test_it_is_ended_where_that_cannot_be_written(tmp_path: Path, how: str, what: str, code: int) -> None:
    """Nothing that would tell of the end keeps it from being one."""
    crew = Crew(2, tmp_path / "logs")
    crew.start(unheard, what, tmp_path / "run", how, json.dumps({"stall": f"requeue,{SHORT}"}))
    codes = crew.wait(60)
    crew.close()
    assert codes[1] == code, crew.said()
    assert codes[0] is not None, crew.said()
    assert what == "both streams" or expected(how, tmp_path) in crew.said()


@launched
def test_it_is_started_again_once_and_ends_right(tmp_path: Path, how: str, undisturbed: float) -> None:
    """By our launcher, from the last commit, with the last loss of the run that never stopped."""
    stall = f"requeue,{SHORT}{QUICK.get(how, '')}"
    words = ("-n", "2", "--max-restarts", "1", "--stall", stall, stuck.__file__, tmp_path / "run", how)
    done = commands.run(*words, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "has made no progress since step" in line]
    assert line.startswith("worldsize: rank 1 of 2 on ")
    assert expected(how, tmp_path) in line
    assert "(starting again, 1 of 1)" in line
    assert last(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)


@pytest.mark.matrix
def test_a_second_stop_at_the_same_step_ends_it(tmp_path: Path) -> None:
    """However many restarts are left."""
    settings = json.dumps({"stall": f"requeue,{SHORT}", "always": True})
    done = commands.run(
        "-n", "2", "--max-restarts", "9", stuck.__file__, tmp_path / "run", "sleeping", settings, timeout=180
    )
    assert done.code == 1
    assert "since step 5, for the second time: sleeps" in done.err
    assert "(not started again: it would stop there again)" in done.err
    assert done.err.count("has made no progress") == 2


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["holding", "sleeping"])
def test_a_rank_alone_ends_itself(tmp_path: Path, how: str, undisturbed: float) -> None:
    """Also where native code holds the only interpreter there is."""
    settings = json.dumps({"stall": "requeue,floor=1,first=8,data=8,save=8"})
    done = commands.run("--max-restarts", "1", stuck.__file__, tmp_path / "run", how, settings, timeout=300)
    assert done.code == 0, done.err
    place = f"in stuck.py:{stuck.HOW[how].__code__.co_firstlineno + 2}"
    assert (
        f"native code holds the interpreter, {place}" in done.err
        or f"sleeps outside of any collective, {place}" in done.err
    )
    assert last(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)


def test_to_wait_is_to_say_it_and_to_go_on(tmp_path: Path, undisturbed: float) -> None:
    """By default nothing is ended: a rank that is stopped and goes on later takes the others along."""
    crew = Crew(2, tmp_path / "logs")
    crew.start(stuck.main, str(tmp_path / "run"), "stopped", json.dumps({"stall": SHORT}))
    commands.until(
        lambda: "has made no progress since step 5: stopped by a signal (state T)" in crew.said(), timeout=60
    )
    os.kill(crew.pids[1], signal.SIGCONT)
    codes, said = crew.wait(60), crew.said()
    crew.close()
    assert codes == [0, 0], said
    assert "worldsize: the training goes on, after " in said
    assert last(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)


@pytest.mark.parametrize(("size", "everything"), [(1, False), (1, True), (2, True)])
def test_time_for_which_all_ranks_are_stopped_ends_nobody(
    tmp_path: Path, size: int, everything: bool, undisturbed: float
) -> None:
    """Not under "requeue" either: a person at a terminal, a suspended job, a container that is paused."""
    crew = Crew(size, tmp_path / "logs")
    settings = {"stall": "requeue,floor=1,first=4,data=4,save=4,evaluation=4"}
    crew.start(stuck.main, str(tmp_path / "run"), "stopped", json.dumps(settings))
    commands.until((tmp_path / "hung-0").exists, timeout=60)
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    if everything:
        os.killpg(crew.pids[0], stop)
    time.sleep(12)
    os.killpg(crew.pids[0], go_on)
    codes, said = crew.wait(60), crew.said()
    crew.close()
    assert codes == [0] * size, said
    assert last(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
