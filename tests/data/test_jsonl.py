from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.data.jsonl import Lines
from worldsize.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def anything(record: Any) -> str | None:
    """Every record will do."""
    del record
    return None


def numbers(record: Any) -> str | None:
    """Only numbers will do."""
    return None if isinstance(record, int) else f"a {type(record).__name__}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for examples of hypothesis."""
    return tmp_path_factory.mktemp("jsonl") / "data.jsonl"


@given(st.lists(JSON, min_size=1))
def test_what_was_written_comes_back(scratch: Path, records: list[Any]) -> None:
    """Any values, each with its line."""
    scratch.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert list(Lines(scratch, anything)) == list(enumerate(records, 1))


def test_a_file_that_is_marked_as_utf_8(tmp_path: Path) -> None:
    """By three bytes at its begin, as some editors do: they are no part of the first line."""
    path = tmp_path / "marked.jsonl"
    path.write_text("1\n2\n", encoding="utf-8-sig")
    assert list(Lines(path, numbers)) == [(1, 1), (2, 2)]


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=8))
def test_no_bytes_are_a_traceback(scratch: Path, lines: list[bytes]) -> None:
    """Records, or our error."""
    scratch.write_bytes(b"\n".join(lines))
    try:
        list(Lines(scratch, anything))
    except DataError as error:
        assert str(scratch) in str(error)  # noqa: PT017 - either is right


def test_a_cut_line_is_named_with_line_and_column(tmp_path: Path) -> None:
    """And not as line 1 of its own text (B076)."""
    path = tmp_path / "data.jsonl"
    good = '{"prompt": "a", "completion": "b"}\n'
    path.write_text(good * 142 + '{"prompt": "a", "completion": "b\n' + good * 57, encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl:143:31: "):
        list(Lines(path, anything))
    lines = Lines(path, anything, "skip")
    assert len(list(lines)) == 199
    assert lines.skipped == [143]


def test_all_lines_are_looked_at_before_it_is_said(tmp_path: Path) -> None:
    """The first five of those that are wrong, and how many there are (B079)."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join("1" if line % 3 else '"x"' for line in range(1, 31)), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(Lines(path, numbers))
    text = str(caught.value)
    assert all(f":{line}:1: a str" in text for line in (3, 6, 9, 12, 15))
    assert "10 lines are not as they must be" in text
    assert "5 more" in text


@pytest.mark.parametrize(("text", "found"), [("", "no lines"), ("\n \n", "no lines"), ('"x"\n', "all wrong")])
def test_nothing_to_train_on_is_an_error(tmp_path: Path, text: str, found: str) -> None:
    """An empty file never counts as trained (B080)."""
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=found):
        list(Lines(path, numbers, "skip"))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    """Line, column, byte."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'"a"\n"\xff"\n')
    with pytest.raises(DataError, match=r":2:2: not UTF-8: byte 0xff"):
        list(Lines(path, anything))


@pytest.mark.parametrize(
    ("value", "found"), [("9" * 5000, "Exceeds the limit"), ("[" * 100_000, "maximum recursion depth")]
)
def test_what_python_does_not_read_is_a_wrong_line(scratch: Path, value: str, found: str) -> None:
    """Numbers and lists without end are said, or left out, as all else that is wrong."""
    scratch.write_text(f"{{}}\n{value}\n")
    with pytest.raises(DataError, match=rf"data\.jsonl:2:1: {found}"):
        list(Lines(scratch, anything))
    lines = Lines(scratch, anything, "skip")
    assert list(lines) == [(1, {})]
    assert lines.skipped == [2]
