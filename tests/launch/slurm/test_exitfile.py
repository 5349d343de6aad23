"""The exit record of an attempt: whatever stands in it is read, and what was written comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.launch.endings import Ending
from worldsize.launch.slurm import exitfile
from worldsize.launch.slurm.exitfile import Failed, Told, parse

if TYPE_CHECKING:
    from pathlib import Path

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
WORDS = st.sampled_from(
    ["committed ", "stopped ", "failed ", "ended ", "followed ", "user-error ", "12", "-", "\n", " ", "²"]
)
RECORD = st.lists(st.one_of(TEXT, WORDS), max_size=12).map("".join)
HOST = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,8}", fullmatch=True)
LINE = TEXT.map(lambda text: " ".join(text.split()))


@given(RECORD)
def test_any_text_is_a_record(text: str) -> None:
    """Half of a line, another program's words, no words at all: nothing of it is an error."""
    told = parse(text)
    assert told.step is None or told.step >= 0
    assert parse(text + "\nended 7\n").code == 7


@given(st.sampled_from(Ending), st.none() | HOST, LINE)
def test_a_failure_that_was_written_reads_back(ending: Ending, host: str | None, line: str) -> None:
    """Kind, host and line; its words are one line of the record."""
    what = Failed(ending, host, line)
    assert what.words.count("\n") == 1
    assert parse(f"committed 3\n{what.words}ended 1\n") == Told(3, stopped=False, failed=what, code=1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("committed 5\ncommitted 9\nended 1\n", Told(9, code=1)),
        ("committed 9\nstopped 12\nended 75\n", Told(12, stopped=True, code=75)),
        ("stopped 0\n", Told(0, stopped=True)),
        ("followed 77;east\n", Told(follower="77")),
        ("failed such-a-kind-is-not-known node1 x\n", Told()),
        ("committed\ncommitted x\ncommitted -1\nsomething 4\n", Told()),
    ],
)
def test_what_the_words_say(text: str, told: Told) -> None:
    """The newest step; that it stopped on request; the last code; unknown words are passed over."""
    assert parse(text) == told


def test_attempts_are_those_of_one_member(tmp_path: Path) -> None:
    """Of an array, each member has its own; a job that followed is in the same line of attempts."""
    records = {
        "exit-12_3-0": "committed 4\nfollowed 20\n",
        "exit-12_4-0": "committed 8\n",
        "exit-20_3-0": "committed 6\n",
    }
    for name, text in records.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    every = exitfile.attempts(tmp_path, "20_3")
    assert {name: told.step for name, told in every.items()} == {"exit-12_3-0": 4, "exit-20_3-0": 6}
    assert exitfile.line_of(every, "20_3") == {"12", "20"}
    assert exitfile.line_of(every, "12_3") == {"12"}


def test_a_record_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    """A job that was killed before it wrote one."""
    assert exitfile.read(tmp_path / "exit-1-0") == Told()
