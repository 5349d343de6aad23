"""What stands between a training and a library: the training never waits, and nothing is lost."""

from __future__ import annotations

import atexit
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import worldsize as ws
from tests.track.books import Book, Broken, Slow
from tests.train import small
from worldsize.testing.nursery import Crew
from worldsize.track import follow, spec
from worldsize.track.jsonl import latest, read
from worldsize.train.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.track.base import Row
    from worldsize.train.step import Step


NEVER = ws.Saving(every=None)
BOOKS = {
    name: f"tests.track.books:{name.title()}" for name in ("book", "slow", "stuck", "broken", "closed", "absent")
}


@pytest.fixture(autouse=True)
def books(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of this file by name."""
    for name, place in BOOKS.items():
        monkeypatch.setitem(spec._KNOWN, name, place)
    monkeypatch.setattr(follow, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(Broken, "failures", 0)
    Book.threads.clear()


def rows(folder: Path) -> list[Row]:
    """What the book of this run holds."""
    return Book.kept[RunFolder(folder).read()["id"]]


def matches(folder: Path) -> None:
    """The book holds what the run's own file says, once each, with growing steps."""
    found = rows(folder)
    assert [row.step for row in found] == sorted({row.step for row in found})
    lines = read(folder / "metrics.jsonl")
    for name in {name for row in found for name in row.values}:
        assert {row.step: row.values[name] for row in found if name in row.values} == latest(lines, name)


def test_all_numbers_arrive_from_another_thread(tmp_path: Path) -> None:
    """Those of the steps and the program's own."""
    small.train(tmp_path, lambda run, step: run.log({"own": step.index}), track="book")
    matches(tmp_path)
    assert len(rows(tmp_path)) == 6
    assert rows(tmp_path)[2].values.keys() >= {"loss", "lr", "own", "epoch"}
    assert Book.threads == {"track book"}
    assert Book.ends[RunFolder(tmp_path).read()["id"]] == [("finished", "finished at step 6 (finished)")]


def half(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """An attempt that is asked to stop after its third step."""
    monkeypatch.setenv("WORLDSIZE_STOP_AFTER", "3")
    small.train(folder, **settings)
    monkeypatch.delenv("WORLDSIZE_STOP_AFTER")


def test_attempts_are_one_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is kept in run.json and given back; the settings come along; how it ended too."""
    half(tmp_path, monkeypatch, track="book")
    small.train(tmp_path, track="book")
    matches(tmp_path)
    assert RunFolder(tmp_path).read()["trackers"] == {"book": {"title": "untitled"}}
    first, second = Book.opened[-2:]
    assert (first.attempt, first.step, dict(first.ids)) == (0, 0, {})
    assert (second.attempt, second.step, dict(second.ids)) == (1, 3, {"title": "untitled"})
    assert second.ended == ["0: stopped at step 3 (stop)"]
    assert second.config["global_batch"] == 8
    assert "commit" in second.environment["code"]
    assert [status for status, _ in Book.ends[second.id]] == ["stopped", "finished"]


def test_one_that_is_named_later_gets_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the run's own file."""
    half(tmp_path, monkeypatch)
    small.train(tmp_path, track="book")
    matches(tmp_path)
    assert len(rows(tmp_path)) == 6


def test_numbers_wait_for_their_commit(tmp_path: Path) -> None:
    """A library that only appends gets no step that might be made again, unless it has waited too long."""
    seen: list[int] = []

    def look(run: ws.Run, step: Step) -> None:
        run.log({"own": step.index})
        time.sleep(0.02)
        seen.append(len(rows(tmp_path)))

    small.train(tmp_path, look, track="book", duration="40st", saving=NEVER)
    assert max(seen) == 0
    assert len(rows(tmp_path)) == 40


def test_numbers_do_not_wait_for_ever(tmp_path: Path) -> None:
    """`hold` seconds."""
    seen: list[int] = []

    def look(run: ws.Run, step: Step) -> None:
        run.log({"own": step.index})
        time.sleep(0.05)
        seen.append(len(rows(tmp_path)))

    small.train(tmp_path, look, track=spec.Track("book", hold=0.1), duration="50st", saving=NEVER)
    assert 0 < max(seen) < 50
    matches(tmp_path)


def test_a_slow_one_does_not_slow_the_steps(tmp_path: Path) -> None:
    """Steps are made while it is busy; it has all at the end."""
    at: list[float] = []
    small.train(tmp_path, lambda *_: at.append(time.monotonic()), duration="30st", saving=small.OFTEN, track="slow")
    assert len(at) == 30
    assert sum(begin < moment < end for moment in at for begin, end in Slow.calls) > 3
    matches(tmp_path)


def test_one_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the time for what is left, with the numbers that it missed."""
    monkeypatch.setattr(follow, "_FINISHING", 0.5)
    assert len(small.train(tmp_path, track="stuck")) == 6
    assert "tracker stuck: did not take steps 0 to 5 within 0.5 s" in capfd.readouterr().err


def test_an_error_is_said_once_and_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On one line; nothing is lost."""
    small.train(
        tmp_path, lambda *_: time.sleep(0.1), track="broken", saving=small.OFTEN, duration="12st"
    )  # fmt: skip
    said = [line for line in capfd.readouterr().err.splitlines() if "tracker" in line]
    (line,) = said
    assert line == (
        "worldsize: tracker broken: ConnectionError: the line is dead; training goes on, and what it misses is sent when "
        "it works again"
    )
    matches(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"), [("absent", r"pip install 'worldsize\[mlflow\]'"), ("closed", "PermissionError: no entry")]
)
def test_one_that_does_not_open_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    """The training is made."""
    assert len(small.train(tmp_path, track=name)) == 6
    said = [line for line in capfd.readouterr().err.splitlines() if "tracker" in line]
    assert len(said) == 2
    assert words.replace("\\", "") in said[0]
    assert "did not take steps 0 to 5" in said[1]


def require(folder: Path, name: str) -> None:
    """A program that needs this tracker, and is not patient."""
    spec._KNOWN[name] = BOOKS[name]
    follow._PATIENCE, follow._FIRST_PAUSE = -1.0, 60.0
    small.train(
        folder, lambda *_: time.sleep(0.05), track=f"{name}:required", saving=small.OFTEN, duration="99st"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "code", "words", "steps"),
    [
        ("absent", 2, "absent is not installed. Do: pip install 'worldsize[mlflow]'.", 0),
        ("closed", 1, "tracker 'closed' is required and fails. Found: PermissionError: no entry.", 0),
        ("broken", 1, "tracker 'broken' is required and fails. Found: ConnectionError: the line is dead.", 1),
    ],
)
def test_one_that_is_required_is_an_error(tmp_path: Path, name: str, code: int, words: str, steps: int) -> None:
    """Before the first step; or later, where it stays away."""
    crew = Crew(1, tmp_path / "logs")
    crew.start(require, tmp_path / "run", name)
    assert crew.wait(60) == [code], crew.said()
    crew.close()
    assert words in crew.said()
    assert "Traceback" not in crew.said()
    assert steps <= len(read(tmp_path / "run" / "metrics.jsonl")) < 99
    assert bool(read(tmp_path / "run" / "metrics.jsonl")) == bool(steps)


def test_a_third_party_brings_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found through the entry point of an installed package, with its options."""
    facts = tmp_path / "site" / "notebook-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook\nVersion: 1.0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[worldsize.trackers]\nnotebook = notes:Notebook\n", encoding="utf-8")
    (tmp_path / "site" / "notes.py").write_text("from tests.track.books import Book as Notebook\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    small.train(tmp_path / "run", track=spec.Track("notebook", title="mine"))
    matches(tmp_path / "run")
    assert RunFolder(tmp_path / "run").read()["trackers"] == {"notebook": {"title": "mine"}}


def fail(folder: Path) -> None:
    """A program that has a book, ends with an exception at its third step, and shows how the book ended."""
    spec._KNOWN["book"] = BOOKS["book"]

    def after(_: ws.Run, step: Step) -> None:
        if step.index == 2:
            atexit.register(lambda: sys.stdout.write(str(Book.ends[RunFolder(folder).read()["id"]])))
            raise ArithmeticError("too much")

    small.train(folder, after, track="book", saving=small.OFTEN)


def test_an_exception_is_the_status(tmp_path: Path) -> None:
    """Said to the library before the process ends, with the line; what is committed is there."""
    crew = Crew(1, tmp_path / "logs")
    crew.start(fail, tmp_path / "run")
    assert crew.wait(60) == [1], crew.said()
    crew.close()
    assert "[('failed', 'ArithmeticError: too much')]" in crew.said()
