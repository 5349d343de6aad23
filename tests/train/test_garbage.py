"""What the garbage collector does during a training, and after it."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from tests.train import small
from worldsize.train.garbage import Garbage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.train.step import Step


class Node:
    """May be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def ring() -> weakref.ref[Node]:
    """A cycle that nothing holds."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


@pytest.fixture(autouse=True)
def _as_in_a_program() -> Iterator[None]:
    """Nothing frozen, as it is where a program begins; what had been frozen is so again afterwards."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_what_was_there_is_not_searched() -> None:
    """Every object of the interpreter is left out."""
    before, spared = len(gc.get_objects()), Garbage()
    spared.spare()
    assert len(gc.get_objects()) < before / 10
    spared.end()


def test_a_program_may_freeze_before_it_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 4,000 objects are there in its first line."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 4000)
    before, spared = len(gc.get_objects()), Garbage()
    spared.spare()
    assert len(gc.get_objects()) > before / 2
    spared.end()


def test_what_python_itself_froze_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 such objects."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    before, spared = len(gc.get_objects()), Garbage()
    spared.spare()
    assert len(gc.get_objects()) < before / 10
    spared.end()


def test_garbage_from_before_is_gone() -> None:
    """It would stay for as long as the training."""
    gc.disable()
    lost = ring()
    gc.enable()
    spared = Garbage()
    spared.spare()
    assert lost() is None
    spared.end()


def test_afterwards_a_cycle_from_before_is_found() -> None:
    """A model of a training that is over, and its memory."""
    held = Node()
    held.other = held
    seen, spared = weakref.ref(held), Garbage()
    spared.spare()
    del held
    spared.end()
    gc.collect()
    assert seen() is None


def test_what_a_program_froze_stays_so() -> None:
    """It knows why. How many objects are frozen does not show it: other threads' end when nothing holds them."""
    held = Node()
    gc.freeze()
    spared = Garbage()
    spared.spare()
    spared.end()
    assert gc.get_freeze_count()
    assert not any(each is held for each in gc.get_objects())


def test_a_collector_that_is_switched_off_is_let_be() -> None:
    """The program collects when it wants to."""
    gc.disable()
    try:
        Garbage().spare()
        assert not gc.get_freeze_count()
    finally:
        gc.enable()


def test_it_is_so_from_the_first_step_to_the_end(tmp_path: Path) -> None:
    """Within a run."""
    seen: list[bool] = []
    small.train(tmp_path, lambda _run, _step: seen.append(gc.get_freeze_count() > 0))
    assert (seen[0], all(seen[1:]), gc.get_freeze_count()) == (False, True, 0)


def test_it_ends_with_an_error_in_the_loop(tmp_path: Path) -> None:
    """A notebook goes on after it."""

    def fail(_run: object, step: Step) -> None:
        assert step.index < 2, "as asked"

    with pytest.raises(AssertionError, match="as asked"):
        small.train(tmp_path, fail)
    gc.collect()
    assert not gc.get_freeze_count()
