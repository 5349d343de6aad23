"""A packed batch is the batch: same structure, numbers, types, and each tensor its own."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from worldsize.data.packed import Packed, packed
from worldsize.data.tree import digest

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - what users return

_ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.int8, np.bool_, np.uint8]),
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
)
_LEAVES = st.one_of(_ARRAYS.map(torch.from_numpy), st.integers(), st.text(max_size=3), st.none())
_BATCHES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(_BATCHES)
def test_any_batch_comes_out_as_it_went_in(batch: Any) -> None:
    """Through a pipe and back: nothing is lost and nothing changes its type."""
    sent = pickle.loads(pickle.dumps(packed(batch)))
    back = sent.opened(None) if isinstance(sent, Packed) else sent
    assert digest(back) == digest(batch)


def test_tensors_of_a_batch_can_be_changed_one_by_one() -> None:
    """Autograd keeps one for its backward pass while another is changed in place."""
    x, y = packed((torch.ones(3), torch.ones(3))).opened(None)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * x).sum()
    y.add_(1)
    loss.backward()
    assert torch.equal(torch.as_tensor(weight.grad), torch.ones(3))


def test_one_tensor_that_stands_twice_is_still_one() -> None:
    """What shares memory before shares it after."""
    mask = torch.ones(4)
    first, second = packed([mask, mask]).opened(None)
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).t(),
        torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(2, requires_grad=True),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(2)),
        torch.zeros(0),
        torch.empty(257 * 1024, dtype=torch.uint8),
    ],
)
def test_what_is_more_than_its_bytes_travels_as_torch_sends_it(tensor: torch.Tensor) -> None:
    """Strides, gradients, sparse layouts, subclasses; and what is too large to be copied once more."""
    batch = [tensor]
    assert packed(batch) is batch
