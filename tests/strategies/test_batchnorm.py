from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.strategies.fitting import opened
from tests.strategies.models import WIDTH
from worldsize.errors import LayoutError
from worldsize.strategies.batchnorm import RunningStatistics, _compose_layer, _values

if TYPE_CHECKING:
    from collections.abc import Iterable


def _flat(layer: nn.BatchNorm1d) -> Tensor:
    return torch.cat([value.reshape(-1).double() for value in _values(layer)])


def _after(start: Tensor, momentum: float | None, passes: Iterable[int]) -> Tensor:
    """What a real layer keeps after these passes, from that start."""
    layer = nn.BatchNorm1d(2, momentum=momentum, dtype=torch.float64)
    values = _values(layer)
    for value, part in zip(values, start.split([2, 2, 1]), strict=True):
        value.copy_(part.view_as(value))
    for number in passes:
        layer(torch.randn(5, 2, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 3 + 1)
    return _flat(layer)


MOMENTA = st.one_of(st.none(), st.floats(0.01, 1.0))
DEALT = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(momentum=MOMENTA, before=st.integers(0, 3), dealt=DEALT)
def test_any_dealing_composes_to_one_rank(momentum: float | None, before: int, dealt: list[int]) -> None:
    """However passes are dealt over ranks, some with none at all, the statistics are those of one rank that made them all."""
    old = _after(torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64), momentum, range(100, 100 + before))
    bounds = [sum(dealt[:index]) for index in range(len(dealt) + 1)]
    ranks = [_after(old, momentum, range(start, stop)) for start, stop in pairwise(bounds)]
    wanted = _after(old, momentum, range(sum(dealt)))
    torch.testing.assert_close(_compose_layer(old, ranks, momentum), wanted, rtol=1e-12, atol=1e-12)


def _statistics(model: nn.Module) -> RunningStatistics:
    return RunningStatistics(model, opened("single"))


class Counting(nn.BatchNorm1d):
    """Counts its calls in a buffer that it puts anew."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - torch's word
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.usefixtures("here")
def test_a_hidden_pass_leaves_no_trace() -> None:
    """An idle rank's pass moves neither running statistics nor any other buffer, not even after an error."""
    model = Counting()
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(ValueError, match="2D or 3D"), _statistics(model).hidden():
        model(model(torch.randn(4, WIDTH))[0])
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("tracking", [True, False])
def test_synchronised_normalisation_is_refused_with_accumulation(*, tracking: bool) -> None:
    """SyncBatchNorm depends on which micro-batches run together: refused where a rank has several."""
    statistics = _statistics(nn.Sequential(nn.SyncBatchNorm(3, track_running_stats=tracking)))
    statistics.refuse_synchronised(1, 1)
    with pytest.raises(LayoutError, match=r"SyncBatchNorm normalises.*accumulation"):
        statistics.refuse_synchronised(2, 1)


@pytest.mark.usefixtures("here")
def test_synchronised_normalisation_is_refused_with_idle_ranks() -> None:
    """A rank without a micro-batch in a step would be waited for; other models may have idle ranks."""
    with pytest.raises(LayoutError, match=r"SyncBatchNorm needs every rank.*drop_last"):
        _statistics(nn.SyncBatchNorm(3)).refuse_synchronised(1, 0)
    _statistics(nn.BatchNorm1d(3)).refuse_synchronised(2, 0)


@pytest.mark.usefixtures("here")
def test_synchronised_statistics_are_not_composed() -> None:
    """SyncBatchNorm's statistics are equal on all ranks already; to compose them would count each pass once a rank."""
    assert not _statistics(nn.SyncBatchNorm(3))._layers
