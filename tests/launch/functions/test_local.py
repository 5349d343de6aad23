"""Functions as processes of this machine: what travels, what comes back, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import as_completed, wait
from typing import TYPE_CHECKING, Any

import pytest

import worldsize as ws
from tests.launch.commands import clean
from worldsize.errors import ConfigError, LaunchError
from worldsize.launch.functions.bundle import NotSentError

if TYPE_CHECKING:
    from pathlib import Path

LOCK = threading.Lock()
LIMIT_S = 60


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def local(**settings: Any) -> ws.SlurmConfig:
    """One process on this machine, unless said otherwise."""
    return ws.SlurmConfig(mode="local", **settings)


def ran(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script that is run from another folder than its own."""
    (folder / "there").mkdir()
    (folder / "there" / "beside.py").write_text("X = 3\n", encoding="utf-8")
    (folder / "there" / "main.py").write_text(f"import os, sys, time, worldsize as ws\n{text}", encoding="utf-8")
    argv = [sys.executable, "there/main.py", *words]
    return subprocess.run(argv, cwd=folder, env=clean(), capture_output=True, text=True, check=False, timeout=LIMIT_S)


@ws.job
def doubled(x: int) -> int:
    """Two of them."""
    return 2 * x


def test_a_plain_call_is_a_plain_call() -> None:
    """Without a configuration nothing is submitted."""
    assert doubled(2) == 4
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Two of them.")


def test_mode_run_calls_here_and_gives_a_finished_job() -> None:
    """So that a program needs no other form for it; what fails is raised at once."""
    assert doubled[ws.SlurmConfig()](2).result() == 4
    with pytest.raises(ZeroDivisionError):
        ws.job(lambda: 1 // 0)[ws.SlurmConfig(mode="debug")]()


def test_lambdas_closures_and_functions_of_modules_travel() -> None:
    """By value where they must, by name where they can (B030)."""
    three = 3
    jobs = [
        ws.job(lambda x: x + 1)[local()](1),
        ws.job(lambda x: x + three)[local()](1),
        doubled[local()](1),
        ws.job(textwrap.dedent)[local()](" b"),
    ]
    assert [job.result(LIMIT_S) for job in jobs] == [2, 4, 2, "b"]


def test_a_script_travels_with_its_classes_and_its_neighbours(tmp_path: Path) -> None:
    """Its functions, a sibling module, and a class of its own as a result and as an exception (B030, B027)."""
    text = """
import beside
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
class OddError(Exception): pass
@ws.job
def main(x):
    if x == 1: raise OddError(os.getcwd())
    return Pair(beside.X, x)
config = ws.SlurmConfig(mode="local")
print(isinstance(main[config](2).result(), Pair), main[config](2).result().a)
try: main[config](1).result()
except OddError as error: print(error)
"""
    done = ran(tmp_path, text)
    assert done.stdout == f"True 3\n{tmp_path}\n", done.stderr


def test_a_call_met_inside_a_job_is_made_there() -> None:
    """It never submits, whatever its configuration says."""
    job = ws.job(lambda: doubled[ws.SlurmConfig(mode="slurm")](2).result())[local()]()
    assert job.result(LIMIT_S) == 4


def test_every_rank_has_its_say() -> None:
    """`results()` are by rank; nodes and tasks of a node are all ranks of this machine."""
    job = ws.job(lambda: os.environ["RANK"])[local(num_of_node=2, tasks_per_node=2)]()
    assert job.result(LIMIT_S) == "0"
    assert job.results() == ["0", "1", "2", "3"]


def test_what_is_a_lock_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The global is named, and what in it is to blame; nothing is left (B030)."""
    keeper = {"log": [LOCK]}
    with pytest.raises(NotSentError, match=r"global LOCK is a _thread\.lock"):
        ws.job(lambda: LOCK)[local()]()
    with pytest.raises(TypeError, match=r"variable keeper\['log'\]\[0\] is a _thread\.lock"):
        ws.job(lambda: keeper)[local()]()
    with pytest.raises(NotSentError, match=r"argument 1\.x is a _thread\.lock"):
        doubled[local()](type("Holds", (), {"__init__": lambda self: setattr(self, "x", LOCK)})())
    assert not (tmp_path / "slurm").exists()


def test_a_result_that_cannot_travel_is_told_as_that(capfd: pytest.CaptureFixture[str]) -> None:
    """The job itself went well, and its output is kept (B030)."""

    def gives() -> Any:
        import sys
        import threading

        sys.stdout.write("trained\n")
        return threading.Lock()

    job = ws.job(gives)[local()]()
    with pytest.raises(LaunchError, match=r"the result of rank 0 of 1 on .*a _thread\.lock cannot be pickled"):
        job.result(LIMIT_S)
    assert "trained" in job.stdout()
    assert "trained" in capfd.readouterr().out


def test_an_exception_that_cannot_travel_comes_as_its_words() -> None:
    """With rank, host and traceback all the same."""

    def fails() -> None:
        class OddError(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"odd {one} {two}")

        raise OddError(1, 2)

    with pytest.raises(LaunchError, match=r"OddError: odd 1 2 \(rank 0 of 1 on .*test_local\.py") as caught:
        ws.job(fails)[local()]().result(LIMIT_S)
    assert "raise OddError(1, 2)" in caught.value.__notes__[0]


def test_it_is_a_future(capfd: pytest.CaptureFixture[str]) -> None:
    """It works with concurrent.futures."""
    jobs = doubled[local()].map_array([1, 2])
    assert sorted(job.result() for job in as_completed(jobs, LIMIT_S)) == [2, 4]
    called: list[Any] = []
    jobs[0].add_done_callback(called.append)
    assert called == [jobs[0]]
    with pytest.raises(TimeoutError):
        ws.job(__import__("time").sleep)[local()](1).result(0.01)
    assert capfd.readouterr().err == ""


def test_a_cancelled_job_has_ended() -> None:
    """Its process is gone."""
    job = ws.job(__import__("time").sleep)[local()](600)
    assert job.cancel()
    assert wait([job], LIMIT_S).done == {job}
    assert job.cancelled()


def test_jobs_wait_for_jobs() -> None:
    """Until they ended as they should; never, where they did not."""
    bad = ws.job(lambda: 1 // 0)[local()]()
    assert doubled[local()][{"afternotok": bad}](1).result(LIMIT_S) == 2
    assert doubled[local()].afterany(bad)(1).result(LIMIT_S) == 2
    with pytest.raises(LaunchError, match="never started"):
        doubled[local()][bad](1).result(LIMIT_S)


def test_two_jobs_never_share_a_folder() -> None:
    """However fast one follows the other."""
    jobs = [doubled[local()](at) for at in range(3)]
    assert len({job.folder for job in jobs}) == 3
    assert [job.result(LIMIT_S) for job in jobs] == [0, 2, 4]


def test_a_program_that_ends_waits_for_its_jobs(tmp_path: Path) -> None:
    """Nobody asked for a result, and the work is done all the same."""
    text = "ws.job(lambda: (time.sleep(1), open('done', 'w')) and None)[ws.SlurmConfig(mode='local')]()"
    assert ran(tmp_path, text).returncode == 0
    assert (tmp_path / "done").exists()


def test_the_code_that_was_packed_is_what_runs(tmp_path: Path) -> None:
    """Edits that are made later do not reach a job."""
    text = """
import beside
@ws.job
def main():
    import late
    return late.X, os.path.basename(os.getcwd())
open("there/late.py", "w").write("X = 1")
job = main[ws.SlurmConfig(mode="local", use_packed_code=True, setup=["sleep 1"])]()
open("there/late.py", "w").write("X = 2")
print(job.result())
"""
    done = ran(tmp_path, text)
    assert done.stdout == "(1, 'code')\n", done.stderr


def test_a_folder_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    """What comes back is a pickle: whoever writes there could run code here."""
    job = ws.job(lambda folder: os.chmod(folder, 0o777))[local(job_name="open")]  # noqa: PTH101, S103 - what is refused
    with pytest.raises(LaunchError, match=r"others can write it.*mode 777"):
        job(_folder_of(tmp_path)).result(LIMIT_S)


def _folder_of(tmp_path: Path) -> Any:
    """The folder of the job that reads this: found on the spot."""

    class There(os.PathLike[str]):
        def __fspath__(self) -> str:
            return next(str(each) for each in (tmp_path / "slurm").iterdir())

    return There()


def test_settings_of_the_decorator_are_for_its_submit() -> None:
    """`@ws.job(mode=...)`; without them there is nothing to submit with."""
    assert ws.job(mode="local")(lambda: 1).submit().result(LIMIT_S) == 1
    with pytest.raises(ConfigError, match="has no configuration"):
        doubled.submit(1)
    with pytest.raises(ConfigError, match="takes a SlurmConfig"):
        doubled[3]
