"""The world as a value."""

from __future__ import annotations

import dataclasses

import pytest

from worldsize.world import World


def test_a_plain_process_is_a_world_of_one() -> None:
    """Without anything said, a process is alone."""
    assert World().alone
    assert not World(rank=1, size=2, local_rank=1, local_size=2).alone


def test_a_world_does_not_change() -> None:
    """A world is read once; nobody changes it later."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "size": 2},
        {"rank": -1},
        {"size": 2, "local_rank": 1},
        {"local_size": 2},
        {"nodes": 2},
        {"size": 2, "node": 1},
    ],
)
def test_impossible_worlds_are_not_made(wrong: dict[str, int]) -> None:
    """No rank beyond its world, and no node or local group larger than the world."""
    with pytest.raises(AssertionError):
        World(**wrong)  # type: ignore[arg-type]
