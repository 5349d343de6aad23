"""From a trial's folder to a row of the table."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from worldsize.cli.table import table
from worldsize.errors import LaunchError
from worldsize.tools.scale import points, show
from worldsize.tools.scale.points import Interval, Point

if TYPE_CHECKING:
    from pathlib import Path


def row(step: int, steps: int, compute: float, waiting: float = 0.0) -> dict[str, Any]:
    """A line of times.jsonl, as train/times.py writes it."""
    names = ("data", "compute", "collectives", "optimizer", "save", "evaluation", "other")
    phases: dict[str, Any] = {name: [0.0, 0.0, 0.0, 0] for name in names}
    phases["compute"][1], phases["collectives"][1], phases["save"][1] = compute, waiting, 99.0
    return {
        "time": 1000.0 + step, "step": step, "steps": steps, "samples": 8 * steps, "phases": phases, "use": [0, 0.5, 1, 0]
    }  # fmt: skip


def folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A run folder with these lines."""
    path.mkdir()
    (path / "times.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_the_beginning_and_saves_are_left_out(tmp_path: Path) -> None:
    """Of forty steps the first ten, where it compiles."""
    run = folder(tmp_path / "run", [row(9, 10, 50.0), row(19, 10, 1.0, 1.0), row(39, 20, 2.0, 2.0)])
    found = points.intervals(run)
    assert [(each.steps, each.seconds, each.samples, each.waiting) for each in found] == [
        (10, 0.2, 8, 0.5), (20, 0.2, 8, 0.5)
    ]  # fmt: skip


def test_too_short_a_trial_is_said(tmp_path: Path) -> None:
    """One interval that holds the beginning tells nothing of the rest."""
    with pytest.raises(LaunchError, match=r"too short to tell its speed.*10 steps.*longer --duration"):
        points.intervals(folder(tmp_path / "run", [row(9, 10, 1.0)]))


def test_a_program_without_a_run_is_said(tmp_path: Path) -> None:
    """Not a traceback of a missing file."""
    with pytest.raises(LaunchError, match=r"no times\.jsonl.*ws\.Run"):
        points.intervals(tmp_path)


def point(ranks: int, *seconds: float, strategy: str = "ddp", nodes: int = 1) -> Point:
    """Steps of eight samples."""
    return Point(strategy, nodes, ranks, tuple(Interval(5, each, 8, 0.1, -1, 0) for each in seconds), epoch=800)


def test_speed_up_and_efficiency_are_beside_the_smallest_of_the_strategy() -> None:
    """By the middle of the steps' times, whatever order they came in."""
    found = points.compared([point(4, 0.5), point(2, 1.0, 0.5, 9.0), point(2, 4.0, strategy="fsdp")])
    told = [(row.point.strategy, row.point.ranks, row.speedup, row.efficiency) for row in found]
    assert told == [("ddp", 2, 1, 1), ("ddp", 4, 2, 1), ("fsdp", 2, 1, 1)]
    assert found[0].point.epoch_seconds == 100


def test_the_csv_is_read_back() -> None:
    """All digits, nothing where nobody told."""
    rows = points.compared([point(2, 1 / 3), point(4, 0.25)])
    back = list(csv.DictReader(io.StringIO(show.as_csv(rows))))
    assert list(back[0]) == list(show.COLUMNS)
    assert [float(line["step_ms"]) for line in back] == [1000 / 3, 250]
    assert {line["joules_per_step"] for line in back} == {""}


def test_the_table_is_for_a_person() -> None:
    """Columns in line; nodes and their ranks."""
    lines = list(table(show.cells(points.compared([point(1, 1.0), point(8, 0.25, nodes=2)])), "l" + "r" * 10))
    assert lines[2].split() == ["ddp", "2", "x", "4", "250", "250..250", "32", "25", "4.00", "50%", "10%", "-", "-"]
    assert len({line.index("%") for line in lines[1:]}) == 1


def test_the_picture_shows_every_point_twice() -> None:
    """As speed-up and as efficiency; well-formed."""
    from xml.dom.minidom import parseString

    text = show.picture(points.compared([point(1, 1.0), point(2, 0.5), point(2, 1.0, strategy="f&<")]), "a & b")
    assert len(parseString(text).getElementsByTagName("circle")) == 6  # noqa: S318 - our own text
