from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_manifest import commit
from worldsize.checkpoint.manifest import FOLDER, committed, folder_name, step_of, verify
from worldsize.checkpoint.retain import (
    GONE,
    OLD,
    TMP,
    Keep,
    best_steps,
    hidden,
    mark_best,
    place,
    prune,
    remove,
    sweep,
)
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

STEPS = st.sets(st.integers(1, 50), min_size=1)


def steps(run_dir: Path) -> list[int]:
    """The steps of the committed checkpoints."""
    return [step for path in committed(run_dir) if (step := step_of(path)) is not None]


@given(STEPS, st.sets(st.integers(1, 50)), st.integers(1, 5), st.none() | st.integers(1, 9), st.integers(0, 3))
def test_what_stays(found: set[int], best: set[int], last: int, every: int | None, count: int) -> None:
    """For any steps: the newest, the last k, each n-th and the best stay, all others go, oldest first."""
    going = Keep(last=last, every=every, best=count).surplus(found, best)
    stay = found - set(going)
    assert max(found) in stay
    assert set(sorted(found)[-last:]) <= stay
    assert {step for step in found if every and step % every == 0} <= stay
    assert going == sorted(going)
    assert len(stay) <= last + count + sum(1 for step in found if every and step % every == 0)


def test_the_best_stays_till_a_better_one() -> None:
    """The latest marked as best stays beside the last ones."""
    assert Keep(last=1, best=1).surplus([1, 2, 3, 4], {1, 2}) == [1, 3]


@pytest.mark.parametrize("keep", [{"last": 0}, {"every": 0}, {"best": -1}])
def test_nonsense_is_refused(keep: dict[str, int]) -> None:
    """Keeping no checkpoint at all is an error."""
    with pytest.raises(ConfigError):
        Keep(**keep)


def test_prune_deletes_and_tells(tmp_path: Path) -> None:
    """What need not stay goes whole, hidden names included."""
    for step in (1, 2, 3, 9, 10):
        commit(tmp_path, step)
    mark_best(tmp_path, 2)
    assert prune(tmp_path, Keep(last=1, every=9), newest=10) == [1, 3]
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir() if path.is_dir()) == [
        folder_name(step) for step in (2, 9, 10)
    ]


def test_skipped_checkpoints_beyond_the_newest_do_not_count(tmp_path: Path) -> None:
    """A damaged checkpoint of a later step, skipped at resume, never pushes out the one just written."""
    for step in (10, 20, 25, 30):
        commit(tmp_path, step)
    assert prune(tmp_path, Keep(last=1), newest=25) == [10, 20]
    assert steps(tmp_path) == [25, 30]


def test_marks_survive_and_add_up(tmp_path: Path) -> None:
    """Steps marked afterwards are remembered on disk."""
    commit(tmp_path, 1)
    mark_best(tmp_path, 1)
    mark_best(tmp_path, 4)
    assert best_steps(tmp_path) == {1, 4}


def test_sweep_removes_what_was_being_written(tmp_path: Path) -> None:
    """Half-written and half-deleted folders of dead writers go; committed ones stay."""
    commit(tmp_path, 1)
    for ending in (TMP, GONE):
        folder = hidden(tmp_path, 2, "dead", ending)
        folder.mkdir()
        (folder / "part").write_text("x")
    assert len(sweep(tmp_path)) == 2
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [folder_name(1)]


def test_sweep_puts_back_what_was_being_replaced(tmp_path: Path) -> None:
    """Killed between the two renames of a replacement: the older one, which is whole, gets its name back."""
    commit(tmp_path, 1).rename(hidden(tmp_path, 1, "dead", OLD))
    sweep(tmp_path)
    assert verify(tmp_path / FOLDER / folder_name(1)) == []


def test_sweep_drops_what_was_replaced(tmp_path: Path) -> None:
    """Killed after the second rename: the new one stays, the old one goes."""
    commit(tmp_path, 1, {"a": "old"}).rename(hidden(tmp_path, 1, "dead", OLD))
    path = commit(tmp_path, 1, {"a": "new"})
    sweep(tmp_path)
    assert (path / "a").read_text() == "new"
    assert len(list(path.parent.iterdir())) == 1


def test_placing_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    """A checkpoint of a step that exists already takes its place."""
    final = commit(tmp_path, 1, {"a": "old"})
    final.rename(tmp_path / "aside")
    tmp = hidden(tmp_path, 1, "t", TMP)
    commit(tmp_path, 1, {"a": "new"}).rename(tmp)
    (tmp_path / "aside").rename(final)
    place(tmp, final)
    assert (final / "a").read_text() == "new"
    assert len(list(final.parent.iterdir())) == 1


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    """Two that delete the same folder do not trip over each other."""
    path = commit(tmp_path, 1)
    remove(path)
    remove(path)
    assert not list(path.parent.iterdir())
