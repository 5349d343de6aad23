"""The names of the package."""

from __future__ import annotations

import pytest

import worldsize as ws
from worldsize import errors, world
from worldsize.train import step


@pytest.mark.parametrize("name", ws.__all__)
def test_every_name_is_there(name: str) -> None:
    """It loads on first use, and `dir` lists it."""
    assert getattr(ws, name) is not None
    assert name in dir(ws)


def test_types_for_annotations_are_the_real_ones() -> None:
    """What a program writes in its signatures and `except` clauses is the class that it gets."""
    assert (ws.Step, ws.LayoutError, ws.World) == (step.Step, errors.LayoutError, world.World)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Runn'"):
        _ = ws.Runn
