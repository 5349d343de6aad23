"""Layouts as a person writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.tools.trial import Layout

AXES = st.dictionaries(st.sampled_from(["tp", "pp", "cp", "replicas"]), st.integers(1, 64).map(str))
LAYOUTS = st.builds(
    lambda strategy, ranks, axes: Layout(strategy, ranks, tuple(axes.items())),
    st.sampled_from(["ddp", "fsdp", "zero3", "my-own"]),
    st.integers(1, 4096),
    AXES,
)


@given(LAYOUTS)
def test_a_layout_is_read_as_it_is_written(layout: Layout) -> None:
    """Whatever its axes."""
    assert Layout.parse(str(layout)) == layout


def test_sizes_without_a_strategy_leave_it_open() -> None:
    """What is chosen where none is named."""
    found = Layout.parse("pp2+schedule=gpipe:2")
    assert (found.strategy, found.options) == ("", {"WORLDSIZE_PP": "2", "WORLDSIZE_SCHEDULE": "gpipe"})


@pytest.mark.parametrize("text", ["", "ddp:0", "ddp:x", "ddp+fsdp:2", "tp2+tp4:8", "+tp2:2"])
def test_nonsense_is_refused(text: str) -> None:
    """With how it is written."""
    with pytest.raises(ConfigError, match="layout"):
        Layout.parse(text)
