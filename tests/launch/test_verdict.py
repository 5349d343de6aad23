"""From reports to exit code and restart."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from worldsize.launch.endings import Ending, from_text
from worldsize.launch.failure import Failure, from_code
from worldsize.launch.verdict import Judge, Report, Verdict

FAILED = Failure("h", 3, "ValueError", rank=0)

failures = st.builds(
    Failure,
    host=st.text(),
    code=st.integers(-64, 255),
    what=st.text(),
    rank=st.none() | st.integers(0, 9),
    age=st.floats(0, 1e6),
)
reports = st.builds(
    Report,
    codes=st.lists(st.integers(-64, 255)).map(tuple),
    failures=st.lists(failures, max_size=3).map(tuple),
    stopped=st.none() | st.sampled_from([2, 15]),
    step=st.none() | st.integers(0, 99),
)


@given(st.lists(reports, min_size=1, max_size=4))
def test_reports_and_verdicts_travel_as_text(found: list[Report]) -> None:
    """What is sent between nodes comes back equal."""
    for report in found:
        assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    verdict = Judge(3).decide(found)
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


@given(st.lists(reports, min_size=1, max_size=4), st.integers(0, 3))
def test_a_stop_is_never_undone_and_a_failure_never_hidden(found: list[Report], limit: int) -> None:
    """Any mix: code 0 only without failures; no restart after a stop."""
    verdict = Judge(limit).decide(found)
    failed = any(report.failures for report in found)
    assert not (verdict.code == 0 and failed)
    if verdict.again:
        assert failed
        assert limit > 0
        assert all(report.stopped is None for report in found)


def test_75_wins_over_0() -> None:
    """Ranks that stopped on request, and one that had ended: start it again."""
    assert Judge().decide([Report(codes=(0, 75))]).code == 75


def test_restarts_follow_the_commits_where_there_are_any() -> None:
    """New steps: again; the same step: no; before the first commit torchrun's rule holds."""
    judge = Judge(max_restarts=99)
    steps = (None, None, 10, 20)
    assert all(judge.decide([Report((3,), (FAILED,), step=step)]).again for step in steps)
    verdict = judge.decide([Report((3,), (FAILED,), step=20)])
    assert not verdict.again
    assert "since step 20" in str(verdict.line)


def test_an_attempt_that_commits_nothing_after_commits_is_the_last() -> None:
    """A later attempt without any commit made no progress either."""
    judge = Judge(max_restarts=9)
    assert judge.decide([Report((3,), (FAILED,), step=5)]).again
    assert not judge.decide([Report((3,), (FAILED,), step=None)]).again


def test_a_training_that_stops_at_the_same_step_again_is_left() -> None:
    """However many restarts there are; the first time it is started again, and Slurm's jobs do the same."""
    first = "rank 1 (h, pid 7) has made no progress since step 17: sleeps; the others wait in all_reduce"
    again = first.replace(":", ", for the second time:", 1)
    for what, retried, ending in ((first, True, Ending.HANG), (again, False, Ending.USER_ERROR)):
        failed = Failure("h", 1, what, rank=1)
        verdict = Judge(9).decide([Report((1, 0), (failed,), step=16)])
        assert verdict.again is retried
        assert from_text(failed.line) is ending
        assert ending.retry is retried


def test_native_code_that_was_stuck_is_told_by_what_c_printed() -> None:
    """The line of the main thread, which comes last."""
    tail = (
        'Timeout (0:05:00)!\nThread 0x1 (most recent call first):\n  File "/lib/x.py", line 1 in wait\n\n'
        'Thread 0x2 (most recent call first):\n  File "/home/me/train.py", line 59 in load\n'
        '  File "/home/me/train.py", line 8 in f\n'
    )
    what, _ = from_code(1, tail)
    assert what == "no progress for 0:05:00: native code holds the interpreter, in train.py:59"
    assert from_text(what) is Ending.HANG
