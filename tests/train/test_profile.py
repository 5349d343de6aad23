"""A look at a few steps."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pools import pool
from tests.train import small
from worldsize.config import Window
from worldsize.errors import ConfigError
from worldsize.train.profile import covered, page

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "profiles/attempt-0"


def test_each_rank_leaves_a_trace_and_one_page_is_written(tmp_path: Path) -> None:
    """Of two real ranks under ddp: their exchange is seen in it."""
    pool(2).run(small.train, tmp_path, profile="steps=1:3")
    for rank in (0, 1):
        events = json.loads(gzip.decompress((tmp_path / FOLDER / f"rank-000{rank}.json.gz").read_bytes()))[
            "traceEvents"
        ]
        names = [event.get("name", "") for event in events]
        assert sum("Optimizer.step" in name for name in names) == 2
        assert any("allreduce" in name or "all_reduce" in name for name in names)
    lines = (tmp_path / FOLDER / "summary.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "worldsize: profile of steps 1 to 2 on 2 ranks"
    shares = [[float(word[:-1]) for word in line.split()[3:]] for line in lines[3:5]]
    assert all(0 < together <= 100 and 0 <= idle < 100 for together, idle in shares)
    assert any("aten::" in line for line in lines[7:])


def test_a_window_that_was_not_reached_leaves_nothing(tmp_path: Path) -> None:
    """Nor one that the end of the run cuts."""
    small.train(tmp_path, profile="5:9")
    assert not (tmp_path / "profiles").exists()


def test_what_is_no_window_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the command line too."""
    with pytest.raises(ConfigError, match="these are no steps"):
        small.make(tmp_path, profile="steps=3:3")
    monkeypatch.setenv("WORLDSIZE_PROFILE_STEPS", "ten")
    with pytest.raises(ConfigError, match="these are no steps"):
        small.make(tmp_path)


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.sampled_from(["steps=", "step = ", ""]))
def test_a_window_is_read_as_it_is_written(first: int, length: int, word: str) -> None:
    """Its first step is in it, the last one is not."""
    window = Window.parse(f"{word}{first}:{first + length}")
    assert first in window
    assert first + length - 1 in window
    assert first + length not in window
    assert first - 1 not in window


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_what_intervals_cover_is_counted_once(ends: list[tuple[int, int]]) -> None:
    """As a count of unit pieces says."""
    spans = [(float(min(pair)), float(max(pair))) for pair in ends]
    pieces = {piece for pair in ends for piece in range(min(pair), max(pair))}
    assert covered(spans) == len(pieces)


def test_the_page_tells_shares_and_the_longest_operators() -> None:
    """In a table for people."""
    text = page(10, 12, [(0.3, 0.03, 0.06)], [(0.2, 6, "aten::mm"), (0.1, 3, "aten::add")])
    assert "  0      100.00 ms        10.0%  20.0%" in text
    assert "  200.00 ms  66.7%         6  aten::mm" in text
