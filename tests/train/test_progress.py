"""What a person sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.train.progress import Lines, Silent, choose, words

if TYPE_CHECKING:
    import pytest


def test_numbers_have_four_digits() -> None:
    """What the step number says already is left out."""
    assert words({"epoch": 3, "samples": 9, "loss": 0.123456, "lr": 1e-5}) == "loss 0.1235  lr 1e-05"


def test_lines_are_whole_and_seldom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """B033: the first after a second, then one every ten; with speed and total."""
    now = [100.0]
    monkeypatch.setattr("worldsize.train.progress.time.monotonic", lambda: now[0])
    lines = Lines(0, 500)
    for step in range(160):
        now[0] += 0.125
        lines.show(step, {"loss": 1.0})
    lines.close()
    found = capsys.readouterr().err.splitlines()
    assert found[0] == "step 8/500  loss 1  8 steps/s"
    assert len(found) == 2


def test_a_resumed_run_counts_its_own_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the steps of the attempt before; nor a total that is not known."""
    now = [0.0]
    monkeypatch.setattr("worldsize.train.progress.time.monotonic", lambda: now[0])
    lines = Lines(1000, None)
    now[0] = 2.0
    lines.show(1003, {})
    assert capsys.readouterr().err.split() == ["step", "1004", "2", "steps/s"]


def test_commits_are_said_seldom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, then at most one every ten seconds: a run may save every step."""
    now = [100.0]
    monkeypatch.setattr("worldsize.train.progress.time.monotonic", lambda: now[0])
    lines = Lines(0, 500)
    for step in range(60):
        now[0] += 0.25
        lines.committed(f"step {step}")
    assert capsys.readouterr().err.splitlines() == ["step 0", "step 40"]


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """And of the other ranks nothing."""
    chosen = choose(0, 5)
    assert isinstance(chosen, Lines)
    Silent().say("x")
    Silent().show(1, {})
    Silent().committed("x")
    assert capsys.readouterr().err == ""
