"""Any state goes apart and together again, through JSON."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.train.plain import empty, join, split

KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from(["tensor:x", "pairs", "list"]),
    st.builds(lambda n, d: torch.arange(n).to(d), st.integers(0, 4), st.sampled_from([torch.float32, torch.int64, torch.bool])),
    st.builds(torch.tensor, st.integers(0, 9)),
)  # fmt: skip
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3), st.tuples(inner, inner), st.just(())
    ),
    max_leaves=12,
)


def equal(left: Any, right: Any) -> bool:
    """Types and tensors included."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and type(left) is type(right) and all(map(equal, left, right))
    return type(left) is type(right) and bool(left == right)


@given(STATES)
def test_any_state_comes_back_through_json(state: Any) -> None:
    """Number keys stay numbers, tuples tuples, and no two tensors share a name."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = json.loads(json.dumps(split(state, "root", tensors)))
    assert equal(state, join(skeleton, tensors))


@given(STATES)
def test_the_skeleton_knows_every_tensor(state: Any) -> None:
    """Names, shapes and dtypes to read a checkpoint into."""
    tensors: dict[str, torch.Tensor] = {}
    wanted = empty(split(state, "root", tensors))
    assert {name: (t.shape, t.dtype) for name, t in wanted.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }


@pytest.mark.parametrize("value", [deque([1]), {1, 2}, b"x", object(), print])
def test_what_cannot_be_read_back_safely_is_refused_with_its_place(value: object) -> None:
    """B058: the path and the type are named."""
    with pytest.raises(ConfigError, match=rf"root/a/0: a {type(value).__name__} cannot be saved"):
        split({"a": [value]}, "root", {})


def test_a_key_that_is_neither_text_nor_number_is_refused() -> None:
    """JSON would give a list back, which is no key."""
    with pytest.raises(ConfigError, match="key of type tuple"):
        split({(1, 2): 3}, "root", {})


def test_numpy_numbers_become_plain() -> None:
    """B058: a metric from numpy does not end as a pickle."""
    import numpy as np

    assert join(split({"a": np.float64(0.5)}, "root", {}), {}) == {"a": 0.5}
    assert json.dumps(split([np.float64(0.5), np.int64(3), np.bool_(1)], "root", {})) == '{"list": [0.5, 3, true]}'


def test_infinity_comes_back() -> None:
    """ReduceLROnPlateau keeps one."""
    assert join(json.loads(json.dumps(split([math.inf], "r", {}))), {}) == [math.inf]
