from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from worldsize.checkpoint import owner as room
from worldsize.checkpoint.manifest import FOLDER
from worldsize.checkpoint.owner import ATTEMPTS, OWNER, alive, claim, current
from worldsize.errors import OwnershipError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.checkpoint.owner import Owner

SPAWN = multiprocessing.get_context("spawn")


def hold(run_dir: Path, ready: Any) -> None:
    """Claim and stay alive."""
    claim(run_dir, run_id="other")
    ready.set()
    signal.pause()


def race(run_dir: Path, barrier: Any, results: Any) -> None:
    """Claim at the same moment as the others, and say whether it worked."""
    barrier.wait()
    try:
        results.put(claim(run_dir, run_id="race").attempt)
    except OwnershipError:
        results.put(None)
    barrier.wait()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """A living process that owns the folder."""
    ready = SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def rewrite(owner: Owner, **changes: Any) -> None:
    """Change what the owner file says, as if another process had written it."""
    (owner.folder / OWNER).write_text(replace(owner, **changes).text())


def test_the_first_claim(tmp_path: Path) -> None:
    """A new run folder is made private and its first attempt is 0."""
    owner = claim(tmp_path / "run", run_id="r", job="77")
    assert owner.attempt == 0
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert current(tmp_path / "run") == owner
    owner.check()


def test_a_living_owner_is_respected(tmp_path: Path, holder: Any) -> None:
    """A second process on the same host is refused with the pid of the first; `force` takes over."""
    with pytest.raises(OwnershipError, match=f"pid {holder.pid}"):
        claim(tmp_path, run_id="r")
    assert claim(tmp_path, run_id="r", force=True).attempt == 1


def test_a_killed_owner_is_followed(tmp_path: Path, holder: Any) -> None:
    """A dead process leaves the folder to the next attempt, at once, reaped or not."""
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert claim(tmp_path, run_id="r").attempt == 1


def test_another_process_with_the_same_pid_is_not_the_owner(tmp_path: Path, holder: Any) -> None:
    """A pid that was given to another process since does not hold the folder."""
    owner = current(tmp_path)
    assert owner
    assert owner.pid == holder.pid
    rewrite(owner, started=owner.started - 3600)
    assert claim(tmp_path, run_id="r").attempt == 1


def test_an_owner_on_another_host_is_followed_and_cut_off(tmp_path: Path) -> None:
    """A writer on another host notices at its next check that its successor has started."""
    old = claim(tmp_path, run_id="r")
    rewrite(old, host="elsewhere")
    assert not alive(replace(old, host="elsewhere"))
    new = claim(tmp_path, run_id="r")
    new.check()
    with pytest.raises(OwnershipError, match=r"attempt 0 .* no longer owns .*attempt 1"):
        old.check()


def test_the_same_process_may_claim_again(tmp_path: Path) -> None:
    """In a notebook a new run object follows the one before, which is cut off."""
    old = claim(tmp_path, run_id="r")
    assert claim(tmp_path, run_id="r").attempt == 1
    with pytest.raises(OwnershipError):
        old.check()


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    """After release nobody is alive in the folder, and the claim is still on record."""
    owner = claim(tmp_path, run_id="r")
    assert alive(owner)
    owner.release()
    last = current(tmp_path)
    assert last
    assert last.released
    assert not alive(last)


def test_release_does_not_touch_a_successor(tmp_path: Path) -> None:
    """A cut-off writer that releases late changes nothing for its successor."""
    old = claim(tmp_path, run_id="r")
    new = claim(tmp_path, run_id="r")
    old.release()
    new.check()


def test_a_damaged_owner_file_is_followed(tmp_path: Path) -> None:
    """An unreadable claim counts as a dead one; its number is not used again."""
    owner = claim(tmp_path, run_id="r")
    (owner.folder / OWNER).write_text("{")
    assert claim(tmp_path, run_id="r").attempt == 1


def test_one_of_racing_claimants_wins(tmp_path: Path) -> None:
    """Of six processes that claim in the same moment exactly one becomes the owner; again after it died."""
    for attempt in range(2):
        barrier, results = SPAWN.Barrier(6), SPAWN.SimpleQueue()
        racers = [SPAWN.Process(target=race, args=(tmp_path, barrier, results)) for _ in range(6)]
        for racer in racers:
            racer.start()
        found = [results.get() for _ in racers]
        for racer in racers:
            racer.join()
        results.close()
        assert [won for won in found if won is not None] == [attempt]


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links are not supported, exclusive creation decides."""

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert [claim(tmp_path, run_id="r").attempt for _ in range(2)] == [0, 1]
    taken = replace(claim(tmp_path, run_id="r"), host="elsewhere")
    with pytest.raises(OwnershipError, match="same moment"):
        room._link(taken)


def test_claiming_sweeps_what_dead_writers_left(tmp_path: Path) -> None:
    """The new owner clears half-written checkpoints before anyone looks for the newest."""
    (tmp_path / FOLDER / ".step-00000004.dead-0.tmp").mkdir(parents=True)
    claim(tmp_path, run_id="r")
    assert not list((tmp_path / FOLDER).iterdir())


def test_nothing_is_left_beside_the_claim(tmp_path: Path) -> None:
    """The owner file is readable JSON and stands alone."""
    owner = claim(tmp_path, run_id="r", job="12")
    assert [path.name for path in owner.folder.iterdir()] == [OWNER]
    assert json.loads((tmp_path / ATTEMPTS / "0" / OWNER).read_text())["job"] == "12"
