"""Facts about Weights & Biases without a way to its server."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.track import libraries
from worldsize.track import wandb as room
from worldsize.track.base import Row, Training
from worldsize.track.wandb import WandB

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the person has who runs this."""
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "https_proxy",
        "HTTPS_PROXY",
        "http_proxy",
        "HTTP_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")


def opened(folder: Path, attempt: int = 0, **more: Any) -> WandB:
    """An attempt of one run."""
    return WandB(Training(folder, "0123456789abcdef0123", attempt, 0, **more))


def rows(first: int, last: int) -> list[Row]:
    """One number a step."""
    return [Row(step, time.time(), {"loss": step / 3}) for step in range(first, last)]


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "offline"),
        ({"WANDB_API_KEY": "k" * 40, "https_proxy": "http://proxy:1"}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_it_is_online_with_a_key_and_a_way(said: dict[str, str], mode: str) -> None:
    """Otherwise in files; what the person says holds."""
    assert room._mode({"NETRC": "/nowhere", **said}) == mode


def test_a_key_may_be_in_netrc(tmp_path: Path) -> None:
    """Of the server that is meant."""
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n", encoding="utf-8")
    assert room._key({"NETRC": str(tmp_path / "netrc")}, "api.wandb.ai")
    assert not room._key({"NETRC": str(tmp_path / "netrc")}, "wandb.mine")


def test_attempts_are_files_of_one_run(tmp_path: Path) -> None:
    """Each goes on behind the last step that the files before have, as their own tool reads them too."""
    hooks = sys.excepthook, sys.exit
    first = opened(tmp_path)
    assert first.through == 0
    first.log(rows(0, 2000))
    first.close("stopped", "in words")
    assert (sys.excepthook, sys.exit) == hooks
    second = opened(tmp_path, 1, ids=first.ids)
    assert (second.through, second.ids) == (2000, first.ids)
    second.log(rows(2000, 2003))
    second.close("finished", "in words")
    found = libraries.wandb(tmp_path)
    assert found.runs == 1
    assert found.history["loss"] == [(row.step, row.values["loss"]) for row in rows(0, 2003)]


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    """Anywhere, as a kill leaves it."""
    book = opened(tmp_path)
    book.log(rows(0, 1500))
    book.close("finished", "")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    whole = file.read_bytes()
    before = -1
    for size in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:size])
        step = room._next_step(tmp_path / "wandb", str(book.ids["id"]))
        assert before <= step <= 1500
        before = max(before, step)
    assert before > 1300
