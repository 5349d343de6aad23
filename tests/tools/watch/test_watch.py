"""Looking on: a run that trains, on a terminal and into a file; and what the lines say."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tools.report import runs
from worldsize.errors import ConfigError
from worldsize.tools.report import reading
from worldsize.tools.watch import view
from worldsize.tools.watch.follow import Follow, Tail

if TYPE_CHECKING:
    from pathlib import Path

WATCH = "import sys; sys.modules['torch'] = None; from worldsize.cli.main import main; main(sys.argv[1:])"
PROGRAM = runs.PROGRAM.replace("0.03 if run.comm.rank == 1 else 0.01", "0.2")
"""Slow enough to be looked at."""


def watch(*words: str | Path) -> list[str]:
    """The command, in an interpreter that fails where torch is asked for."""
    return [sys.executable, "-c", WATCH, "watch", *map(str, words)]


def started(folder: Path) -> subprocess.Popen[bytes]:
    """A training of five seconds in `folder`/live, once its first step is made."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    words = ["run", "--nproc-per-node", "2", "train.py", "live"]
    environ = {**os.environ, "PYTHONPATH": str(runs.ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "worldsize", *words],
        cwd=folder,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = folder / "live" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    return process


def on_a_terminal(command: list[str]) -> tuple[int, str]:
    """The exit code, and all that a terminal of 100 columns was sent."""
    leader, follower = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environ)
    os.close(follower)
    seen = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(leader)
    return process.wait(), seen.decode()


def test_a_run_is_seen_while_it_trains(tmp_path: Path) -> None:
    """Redrawn on a terminal, lines in a file; both end with the run."""
    process = started(tmp_path)
    with (tmp_path / "lines").open("wb") as file:
        beside = subprocess.Popen(watch(tmp_path / "live"), stdout=file, stderr=subprocess.STDOUT)
        code, seen = on_a_terminal(watch(tmp_path / "live", "--every", "200ms"))
        assert (process.wait(), code, beside.wait()) == (0, 0, 0), seen
    screens = re.split(r"\x1b\[1A", seen)
    steps = [int(found) for found in re.findall(r"(\d+) of 24 steps", re.sub(r"\x1b\[[\d;]*m", "", seen))]
    assert len(screens) > 20
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3
    assert steps[-1] == 24
    assert "next at step" in seen
    lines = (tmp_path / "lines").read_text(encoding="utf-8")
    assert "\x1b" not in lines
    assert re.match(r"step \d+/24  loss [\d.]+ .* attempt 0  running\n", lines), lines
    assert lines.rstrip().endswith("attempt 0  finished")


def facts(folder: Path, *events: dict[str, Any], metrics: str = "", times: str = "") -> reading.RunFacts:
    """A run folder with these lines."""
    (folder / "attempts").mkdir(parents=True)
    rows = [{"attempt": 0, "time": 1000.0 + number, **event} for number, event in enumerate(events)]
    for name, text in (("events", "\n".join(map(json.dumps, rows))), ("metrics", metrics), ("times", times)):
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return reading.facts(folder)


@pytest.mark.parametrize(
    ("every", "made", "expected"),
    [("5st", 7, 10), ("2ep", 7, 12), ("64sa", 9, 16), ("None", 7, 24), ("500st", 7, 24)],
)
def test_the_next_save_follows_from_the_settings(tmp_path: Path, every: str, made: int, expected: int) -> None:
    """In steps, epochs of six steps, samples of eight a step; at the end where nothing else is said."""
    start = {
        "event": "start",
        "step": 0,
        "total": 24,
        "steps_per_epoch": 6,
        "config": {"save every": every, "global_batch": 8},
    }
    row = json.dumps({"step": made - 1, "samples": made * 8, "loss": 1.0, "attempt": 0, "time": 1001.0})
    assert view.next_save(facts(tmp_path / "run", start, metrics=row)) == expected


def test_a_failure_stands_at_the_end(tmp_path: Path) -> None:
    """With its attempt; what is said of one that told nothing is said too."""
    run = facts(tmp_path / "run", {"event": "start", "step": 0}, {"event": "failure", "line": "ValueError: no"})
    shown = ["".join(text for text, _ in line) for line in view.lines(run)]
    assert shown[-1].split() == ["failure", "attempt", "0:", "ValueError:", "no"]
    assert reading.failures(run)[0]["ending"] == "user error"
    assert reading.failures(facts(tmp_path / "other", {"event": "start", "step": 0}))[0]["line"].startswith(
        "it ended without"
    )


def test_before_anything_has_begun_it_says_so(tmp_path: Path) -> None:
    """In one line, not as a traceback."""
    (tmp_path / "attempts").mkdir()
    with pytest.raises(ConfigError, match="nothing has begun"):
        Follow(tmp_path).look()
    done = subprocess.run(watch(tmp_path / "nowhere"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("worldsize: this is no run folder.")


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """And a file that comes later is found."""
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    tail.read()
    path.write_text('{"step": 0}\n{"st')
    tail.read()
    assert list(tail.rows) == [{"step": 0}]
    with path.open("a") as file:
        file.write('ep": 1}\nnot json\n')
    tail.read()
    assert list(tail.rows) == [{"step": 0}, {"step": 1}]


@example([1.7976931348623157e308, -9.9792015476736e291])
@example([0.0, 5e-324])
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300))
def test_a_sparkline_is_short_whatever_the_numbers_are(values: list[float]) -> None:
    """One character a stretch, at most forty."""
    found = view.sparkline(values)
    assert len(found) <= 40
    assert set(found) <= set("▁▂▃▄▅▆▇█ ")


def test_a_sparkline_falls_with_its_numbers() -> None:
    """From the highest bar to the lowest."""
    assert view.sparkline([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]) == "█▇▆▅▄▃▂▁"
    assert view.sparkline([1.0, float("nan"), 1.0]) == "▁ ▁"
