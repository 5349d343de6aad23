from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.data import tokens as room
from worldsize.data.tokens import Document, Tokens, cached, flat
from worldsize.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

DOCUMENT = st.builds(
    lambda pairs, line: Document([number for number, _ in pairs], [mark for _, mark in pairs], line),
    st.lists(st.tuples(st.integers(0, 70_000), st.booleans()), max_size=9),
    st.integers(1, 10**6),
)


@dataclass
class Made:
    """Gives documents, and counts how often it was asked."""

    given: list[Document] = field(default_factory=lambda: [Document([1, 2, 3], None, 1), Document([4], None, 2)])
    largest: int = 70_000
    asked: int = 0
    takes: float = 0

    def documents(self) -> Iterable[Document]:
        """All of them."""
        self.asked += 1
        time.sleep(self.takes)
        return self.given

    def plan(self, tokens: Tokens) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Their number and lengths."""
        return {"documents": len(tokens)}, {"lengths": tokens.lengths}


def silent(text: str) -> None:
    """Nobody listens."""
    del text


@given(st.lists(DOCUMENT, max_size=6), st.sampled_from([70_000, 80_000]))
def test_what_was_made_comes_back(given_documents: list[Document], largest: int) -> None:
    """Tokens, marks, lines and plans, from memory-mapped files."""
    with tempfile.TemporaryDirectory() as folder:
        maker = Made(given_documents, largest)
        cached(Path(folder), "key", maker, silent)
        found = cached(Path(folder), "key", maker, silent)
        assert maker.asked == 1
        assert found.values.tolist() == [number for each in given_documents for number in each.tokens]
        marks = [mark for each in given_documents for mark in each.learnt or ()]
        assert (found.learnt is None and all(marks)) or (found.learnt is not None and found.learnt.tolist() == marks)
        assert found.lines.tolist() == [each.line for each in given_documents]
        assert found.plans["lengths"].tolist() == [len(each.tokens) for each in given_documents]
        assert found.facts == {"documents": len(given_documents)}


def test_few_tokens_take_two_bytes(tmp_path: Path) -> None:
    """As many as the largest needs."""
    assert cached(tmp_path, "small", Made(largest=65_535), silent).values.dtype == np.uint16
    assert cached(tmp_path, "large", Made(largest=65_536), silent).values.dtype == np.uint32


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """With the line; nothing is kept."""
    maker = Made([Document([1, 9], None, 7)], largest=8)
    with pytest.raises(DataError, match="line 7: 9, the largest is 8"):
        cached(tmp_path, "key", maker, silent)
    assert list(tmp_path.iterdir()) == []


MAKES = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.data.test_tokens import Made
from worldsize.data.tokens import cached
maker = Made(takes=1.0)
found = cached(Path({folder!r}), "key", maker, print)
print(maker.asked, found.values.tolist())
"""


def test_one_of_several_processes_makes_them(tmp_path: Path) -> None:
    """The others wait, and read the same (B074)."""
    source = MAKES.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    argv = [sys.executable, "-c", source]
    started = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split(maxsplit=1) for process in started]
    assert sorted(asked for asked, _ in said) == ["0", "0", "1"]
    assert {values.strip() for _, values in said} == {"[1, 2, 3, 4]"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_who_died_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim without signs of life counts no more."""
    monkeypatch.setattr(room, "_DEAD_S", 0.5)
    (tmp_path / "key.making").write_text("node7 12\n", encoding="utf-8")
    assert len(cached(tmp_path, "key", Made(), silent)) == 2
    assert not (tmp_path / "key.making").exists()


def test_who_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: its signs of life count, not its age. Without them a second maker would begin."""
    for name, value in (("_BEAT_S", 0.1), ("_DEAD_S", 1.0), ("_POLL_S", 0.05)):
        monkeypatch.setattr(room, name, value)
    maker, begun = Made(takes=4.0), time.monotonic()
    with ThreadPoolExecutor(2) as both:
        found = [both.submit(cached, tmp_path, "key", maker, silent) for _ in range(2)]
        assert {tuple(each.result().values.tolist()) for each in found} == {(1, 2, 3, 4)}
    assert maker.asked == 1
    assert time.monotonic() - begun > 3 * room._DEAD_S


def test_who_waits_is_told_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and process of the maker."""
    monkeypatch.setattr(room, "_DEAD_S", 1.0)
    monkeypatch.setattr(room, "_SAY_S", 0.2)
    (tmp_path / "key.making").write_text("node7 12\n", encoding="utf-8")
    said: list[str] = []
    cached(tmp_path, "key", Made(), said.append)
    assert said[0] == "waiting for node7 12 to make tokens"


def test_a_file_as_folder_is_said(tmp_path: Path) -> None:
    """With what to set."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="cache_dir"):
        cached(tmp_path / "file", "key", Made(), silent)


def test_flat_files(tmp_path: Path) -> None:
    """Numbers of NumPy, and bare ones of the width that the largest token needs."""
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.int32))
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "b.bin")
    np.arange(5, dtype=np.uint32).tofile(tmp_path / "c.bin")
    np.save(tmp_path / "d.npy", np.ones((2, 2)))
    assert flat(tmp_path / "a.npy", 9).tolist() == flat(tmp_path / "b.bin", 9).tolist() == list(range(5))
    assert flat(tmp_path / "c.bin", 1 << 16).tolist() == list(range(5))
    with pytest.raises(DataError, match="2 dimensions of float64"):
        flat(tmp_path / "d.npy", 9)
    with pytest.raises(DataError, match="holds no tokens"):
        flat(tmp_path / "none.bin", 9)
