"""After an attempt that failed: what it was, from what its ranks left; and whether it comes again, and where not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from worldsize.launch.endings import Ending
from worldsize.launch.slurm.after import Attempt, Next, decide, failed
from worldsize.launch.slurm.exitfile import Failed

if TYPE_CHECKING:
    from pathlib import Path

TRACE = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 3, in load\n    x\n{}\n'
HOSTS = ("node1", "node1", "node2", "node2")
SUMMARY = """\
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_08:00:00
  host      : node2
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 12)
  error_file: <N/A>
============================================================
"""
NODE = Failed(Ending.NODE_FAILURE, "node2", "uncorrectable ECC error")


def attempt(folder: Path, text: str = "", code: int = 1, number: str = "0") -> Attempt:
    """One of job 12, with this log."""
    log = folder / "log"
    log.write_text(f"old\nworldsize: job 12, attempt {number}, on 2 nodes\n{text}", encoding="utf-8")
    return Attempt(folder, "12", number, code, HOSTS, log, began=100.0)


def labelled(rank: int, text: str) -> str:
    """As srun prints it."""
    return "".join(f"{rank}: {line}\n" for line in text.splitlines())


def record(folder: Path, number: str, *lines: str) -> None:
    """What an attempt of job 12 left."""
    (folder / f"exit-12-{number}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def error_file(folder: Path, rank: int, text: str, at: float) -> None:
    """What a rank of ours leaves."""
    path = folder / "logs-12" / f"rank-{rank}-error.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"message": text, "rank": rank, "host": "node2", "time": at}), encoding="utf-8")


def test_the_first_rank_that_left_a_file_is_the_cause(tmp_path: Path) -> None:
    """With rank and host; whoever only lost a peer, and a file of an earlier attempt, are not it."""
    error_file(tmp_path, 0, "RuntimeError: Connection closed by peer", 101.0)
    error_file(tmp_path, 3, "ValueError: bad key x", 102.0)
    error_file(tmp_path, 2, "KeyError: of an earlier attempt", 50.0)
    what = failed(attempt(tmp_path))
    assert (what.ending, what.host) == (Ending.USER_ERROR, "node2")
    assert what.line.startswith("rank 3 of 4 on node2 failed: ValueError: bad key x")


def test_the_traceback_that_began_first_is_the_cause(tmp_path: Path) -> None:
    """Lines of several ranks, each with its label, are put together again."""
    mixed = zip(
        labelled(2, TRACE.format("ValueError: bad key x")).splitlines(),
        labelled(1, TRACE.format("KeyError: 'later'")).splitlines(),
        strict=True,
    )
    what = failed(attempt(tmp_path, "".join(f"{one}\n{other}\n" for one, other in mixed)))
    assert what.line.startswith("rank 2 of 4 on node2 failed: ValueError: bad key x (train.py:3 in load)")
    assert (what.ending, what.host) == (Ending.USER_ERROR, "node2")


def test_torchruns_summary_names_rank_and_host(tmp_path: Path) -> None:
    """Its own traceback is not the answer."""
    what = failed(attempt(tmp_path, TRACE.format("ValueError: bad key x") + SUMMARY))
    assert what.line.startswith("rank 3 of 4 on node2 failed: ValueError: bad key x")
    assert what.host == "node2"


def test_what_an_earlier_attempt_printed_is_not_read(tmp_path: Path) -> None:
    """All attempts write to one log."""
    log = tmp_path / "log"
    text = f"worldsize: job 12, attempt 0, on 1 nodes\n{labelled(0, TRACE.format('ValueError: old'))}"
    log.write_text(f"{text}worldsize: job 12, attempt 1, on 1 nodes\ngone\n", encoding="utf-8")
    assert "old" not in failed(Attempt(tmp_path, "12", "1", 1, HOSTS, log)).line


@pytest.mark.parametrize(
    ("code", "text", "ending", "says"),
    [
        (7, "last words\n", Ending.USER_ERROR, "exit code 7: last words"),
        (137, "", Ending.UNKNOWN, "killed by SIGKILL"),
        (139, "", Ending.UNKNOWN, "killed by SIGSEGV"),
        (137, "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0\n", Ending.HOST_MEMORY, "SIGKILL"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.\n", Ending.GPU_MEMORY, "out of memory"),
        (143, "slurmstepd: *** JOB 12 CANCELLED AT now DUE TO TIME LIMIT ***\n", Ending.TIME_LIMIT, "SIGTERM"),
    ],
)
def test_without_a_traceback_code_and_log_say_it(
    tmp_path: Path, code: int, text: str, ending: Ending, says: str
) -> None:
    """A code is an error of the program, a signal alone tells nothing about it."""
    what = failed(attempt(tmp_path, text, code))
    assert what.ending is ending
    assert says in what.line


def test_a_log_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    """The code is left."""
    assert "exit code 3" in failed(Attempt(tmp_path, "12", "0", 3, HOSTS, tmp_path / "none")).line


@pytest.mark.parametrize("ending", [Ending.USER_ERROR, Ending.GPU_MEMORY, Ending.CANCELLED])
def test_what_would_come_again_stays(tmp_path: Path, ending: Ending) -> None:
    """However much was committed, and however often it may be tried."""
    record(tmp_path, "0", "committed 9")
    told = decide(attempt(tmp_path), Failed(ending, None, "x"), 5)
    assert told == Next(again=False, why=f"{ending.value}, which would come again")


@pytest.mark.parametrize("lines", [(), ("committed 9",), ("committed 4",)])
def test_without_a_new_step_it_stays(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """The attempt before had committed step 9."""
    record(tmp_path, "0", "committed 9", NODE.words.strip())
    record(tmp_path, "1", *lines)
    told = decide(attempt(tmp_path, number="1"), NODE, 5)
    assert told == Next(again=False, why="nothing was committed since step 9")


def test_restarts_are_counted_over_attempts(tmp_path: Path) -> None:
    """Two failed before; a stop on request is none."""
    record(tmp_path, "0", "committed 3", NODE.words.strip())
    record(tmp_path, "1", "stopped 5")
    record(tmp_path, "2", "committed 7", NODE.words.strip())
    record(tmp_path, "3", "committed 9", NODE.words.strip())
    assert decide(attempt(tmp_path, number="3"), NODE, 2) == Next(again=False, why="2 of 2 restarts are used")
    assert decide(attempt(tmp_path, number="3"), NODE, 3).why == "node failure, restart 3 of 3"


def test_nodes_that_failed_are_left_out_those_of_earlier_attempts_too(tmp_path: Path) -> None:
    """Only where it was the node."""
    record(tmp_path, "0", "committed 3", NODE.words.strip())
    record(tmp_path, "1", "committed 5", Failed(Ending.HANG, "node4", "hangs").words.strip())
    record(tmp_path, "2", "committed 7")
    told = decide(attempt(tmp_path, number="2"), Failed(Ending.NODE_FAILURE, "node1", "ECC error"), 5)
    assert (told.again, told.without) == (True, ("node1", "node2"))
