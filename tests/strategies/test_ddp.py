from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.strategies.fitting import MICROS, Fit, opened, placed
from tests.strategies.models import Blocks, Disordered, Unused, sometimes

if TYPE_CHECKING:
    from worldsize.testing.ranks import RankPool


def _resumed(build: type[nn.Module], *, wide: float) -> bool:
    """Whether steps 2 and 3 come out bit for bit alike when the process begins with them."""
    strategy = opened("ddp", "fp32")
    straight = Fit(strategy, placed(strategy, build, bucket_mb=wide))
    for index in (0, 1):
        straight.step(index)
    weights = {name: value.clone() for name, value in straight.model.state_dict().items()}
    slots = copy.deepcopy(straight.optimizer.state_dict())
    resumed = Fit(strategy, placed(strategy, build, bucket_mb=wide))
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(slots)
    for index in (2, 3):
        straight.step(index)
        resumed.step(index)
    return bool(straight.outcome()["state"] == resumed.outcome()["state"])


@pytest.mark.parametrize("build", [Blocks, Disordered])
def test_a_resumed_run_sums_in_the_same_order(build: type[nn.Module], three: RankPool) -> None:
    """On three ranks, over several buckets, four steps equal two steps and two more in a new wrapper, bit for bit."""
    assert three.run(_resumed, build, wide=0.0002) == [True] * 3


def _buckets() -> tuple[int, bool]:
    strategy = opened("ddp")
    made = Fit(strategy, placed(strategy, Blocks, bucket_mb=0.0002))
    wrapper = strategy._entries[made.model].wrapper  # type: ignore[attr-defined]
    again = bool(wrapper.reducer._rebuild_buckets())
    made.step(0)
    made.step(1)
    return wrapper._get_ddp_logging_data()["num_buckets_reduced"], again


def test_the_buckets_are_settled_before_the_first_step(two: RankPool) -> None:
    """Small buckets are chosen while the model is placed, from then on there is nothing left to rebuild."""
    assert two.run(_buckets) == [(5, False)] * 2


def _warned() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = opened("ddp")
        for build, options in ((Blocks, {}), (Blocks, {"unused_parameters": "allow"})):
            made = Fit(strategy, placed(strategy, build, **options))
            for index in (0, 1):
                made.step(index)
    return [str(each.message) for each in found]


def test_the_wrapper_is_silent(two: RankPool) -> None:
    """None of DistributedDataParallel's own warnings reaches the user, in either mode."""
    assert two.run(_warned) == [[], []]


def _drift(accumulate: int) -> list[list[float]]:
    strategy = opened("ddp")
    made = Fit(strategy, placed(strategy, Unused, unused_parameters="allow"), sometimes)
    seen = []
    for index in range(3):
        for number in range(accumulate):
            made.micro(index, strategy.rank * accumulate + number, last=number == accumulate - 1)
        assert strategy.check_gradients(made.model) == []
        made.optimizer.step()
        made.optimizer.zero_grad()
        seen.append(torch.cat([value.detach().flatten() for value in made.model.parameters()]).tolist())
    return seen


@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_ranks_stay_bit_equal(accumulate: int, two: RankPool) -> None:
    """After every step all ranks hold the same weights, however many micro-batches they accumulate (B069)."""
    first, second = two.run(_drift, accumulate)
    assert first == second


def _idle() -> dict[str, Any]:
    """The second rank has nothing in this step but one dummy of weight 0."""
    strategy = opened("ddp")
    made = Fit(strategy, placed(strategy, Blocks))
    mine = range(MICROS) if strategy.rank == 0 else range(1)
    for number in mine:
        if strategy.rank == 0:
            made.micro(0, number, last=number == MICROS - 1)
        else:
            strategy.exchange(made.model, last=True)
            (made.model(torch.ones(1, 6, dtype=torch.float64)).sum() * 0.0).backward()
            strategy.sent(made.model)
    return {name: value.grad.tolist() for name, value in made.model.named_parameters() if value.grad is not None}


def test_an_idle_rank_gives_nothing_and_gets_all(two: RankPool) -> None:
    """A rank without micro-batches passes once with weight 0 and gets the same gradients as the others."""
    first, second = two.run(_idle)
    assert first == second
    assert any(any(map(bool, value)) for value in first.values() if isinstance(value[0], float))


def _graphs() -> int:
    """How many graphs the blocks of a model are compiled to."""
    found: list[Any] = []

    def compiled(graph: Any, inputs: Any) -> Any:
        del inputs
        found.append(graph)
        return graph.forward

    strategy = opened("ddp")
    made = Fit(strategy, placed(strategy, Blocks, bucket_mb=0.0002, compile={"backend": compiled}))
    made.step(0)
    return len(found)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_block_is_one_graph_whatever_the_buckets_are(two: RankPool) -> None:
    """Not one for each bucket: what lies between pieces would be held. Two, for the first block's input has no gradient."""
    assert two.run(_graphs) == [2] * 2
