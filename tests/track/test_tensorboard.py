"""Facts about TensorBoard's files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.track import libraries
from worldsize.track.base import Row, Several, Training
from worldsize.track.follow import Follower, Place
from worldsize.track.jsonl import JsonLines
from worldsize.track.spec import Track
from worldsize.track.tensorboard import TensorBoard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.track.base import Status

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def rows(first: int, last: int, scale: float = 1.0) -> list[Row]:
    """One number a step."""
    return [Row(step, time.time(), {"loss": scale * step}) for step in range(first, last)]


def training(folder: Path, attempt: int = 0, step: int = 0, **more: Any) -> Training:
    """An attempt of one run."""
    return Training(folder, "id", attempt, step, **more)


def test_an_attempt_takes_back_what_does_not_hold(tmp_path: Path) -> None:
    """It begins where its training does, or where the attempt before had not come so far."""
    first = TensorBoard(training(tmp_path))
    assert first.through == 0
    first.log(rows(0, 8))
    second = TensorBoard(training(tmp_path, 1, 5))
    assert second.through == 5
    second.log(rows(5, 7, 10.0))
    third = TensorBoard(training(tmp_path, 2, 9))
    assert third.through == 7
    third.log(rows(7, 12, 100.0))
    history = libraries.tensorboard_history(tmp_path)["loss"]
    assert [value for _, value in history] == [0, 1, 2, 3, 4, 50, 60, 700, 800, 900, 1000, 1100]


def test_a_training_that_goes_back_by_itself_takes_back_too(tmp_path: Path) -> None:
    """Within one attempt, as after a loss that is not finite."""
    lines = JsonLines(tmp_path, 0)
    follower = Follower(Track("tensorboard"), Place(tmp_path, "id", 0, {}, lambda _: None, lambda _: None))
    both = Several([lines, follower])
    both.event("start", step=0)
    for step in range(6):
        both.log(step, {"loss": step})
    wait_for(lambda: len(libraries.tensorboard_history(tmp_path).get("loss", [])) == 5)
    for step in range(3, 8):
        both.log(step, {"loss": step * 10})
    both.event("end", step=8, reason="finished")
    both.close()
    assert [value for _, value in libraries.tensorboard_history(tmp_path)["loss"]] == [0, 1, 2, 30, 40, 50, 60, 70]


def wait_for(true: Callable[[], bool]) -> None:
    """Until it is, and not for ever."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_attempt_that_logged_nothing_leaves_its_place(tmp_path: Path) -> None:
    """The next one begins there."""
    TensorBoard(training(tmp_path)).log(rows(0, 8))
    TensorBoard(training(tmp_path, 1, 5))
    assert TensorBoard(training(tmp_path, 2, 6)).through == 5


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    """As a kill leaves it."""
    TensorBoard(training(tmp_path)).log(rows(0, 8))
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert TensorBoard(training(tmp_path, 1, 8)).through == 7


def test_clocks_of_two_hosts_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the second attempt is an hour behind; its numbers hold nevertheless."""
    TensorBoard(training(tmp_path)).log(rows(0, 8))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    TensorBoard(training(tmp_path, 1, 4)).log(rows(4, 6, 10.0))
    assert [value for _, value in libraries.tensorboard_history(tmp_path)["loss"]] == [0, 1, 2, 3, 40, 50]


@pytest.mark.parametrize(("status", "code"), [("finished", "1"), ("failed", "2"), ("stopped", "0")])
def test_it_says_how_it_ended(tmp_path: Path, status: Status, code: str) -> None:
    """On the page of hyperparameters, and in words."""
    board = TensorBoard(
        training(tmp_path, config={"seed": 1, "accept": [], "none": None}, environment={"torch": "2"})
    )
    board.log(rows(0, 1))
    board.close(status, "in words")
    assert libraries.tensorboard(tmp_path).status == code
    texts = libraries.tensorboard_texts(tmp_path)
    assert f"{status}: in words" in texts["run/attempts"]
    assert "| torch | 2 |" in texts["run/environment"]
    assert "| seed | 1 |" in texts["run/config"]


def test_a_folder_of_its_own_may_be_given(tmp_path: Path) -> None:
    """For a place that several runs share."""
    TensorBoard(training(tmp_path), folder=tmp_path / "all" / "mine").log(rows(0, 1))
    assert len(list((tmp_path / "all" / "mine").iterdir())) == 1
