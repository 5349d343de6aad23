from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from worldsize.runtime.stretch import Stretch


@given(st.data())
def test_the_boxes_of_a_stretch_are_its_values_where_they_lie(data: st.DataObject) -> None:
    """Whatever stretch of whatever shape: written where the boxes say, they are the stretch and nothing else."""
    shape = torch.Size(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    size = data.draw(st.integers(0, count - begin))
    whole = torch.zeros(shape)
    for offsets, values in Stretch(torch.arange(1.0, size + 1), shape, begin).boxes():
        whole[tuple(slice(at, at + length) for at, length in zip(offsets, values.shape, strict=True))] += values
    wanted = torch.zeros(count)
    wanted[begin : begin + size] = torch.arange(1.0, size + 1)
    assert torch.equal(whole.view(-1), wanted)


@given(st.data())
def test_a_stretch_is_few_boxes(data: st.DataObject) -> None:
    """At most twice as many as there are dimensions, less one."""
    shape = torch.Size(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    begin = data.draw(st.integers(0, math.prod(shape)))
    size = data.draw(st.integers(0, math.prod(shape) - begin))
    assert len(list(Stretch(torch.zeros(size), shape, begin).boxes())) < 2 * len(shape)
