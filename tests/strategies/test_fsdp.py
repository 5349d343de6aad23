from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.strategies.fitting import Fit, attempt, micro, opened, placed
from tests.strategies.models import WIDTH, Block, Blocks, Disordered, NormBlocks, TiedBlocks, TiedToBlock
from worldsize.strategies.base import full
from worldsize.strategies.norm import gradients, norm, scale_

if TYPE_CHECKING:
    from worldsize.testing.ranks import RankPool


def _after_evaluation() -> tuple[bool, bool]:
    """Weights changed between two passes without gradients, through the call and through a method."""
    strategy = opened("fsdp")
    model = placed(strategy, Blocks)
    assert isinstance(model, Blocks)
    x, _ = micro(0, 0)
    seen = []
    for call in (model, model.encode):
        with torch.no_grad():
            live = {name: value.detach() for name, value in model.state_dict().items()}
            before = call(x)
            for value in live.values():
                value.mul_(1.5)
            after = call(x)
        seen.append(torch.equal(before, after))
    return seen[0], seen[1]


def test_a_pass_without_gradients_keeps_no_whole_copy(two: RankPool) -> None:
    """Averaged weights that are put into the shards are used by the next pass, and the model's own after them."""
    assert two.run(_after_evaluation) == [(False, False)] * 2


def _lazily() -> list[Any]:
    """A method under no_grad before anything else."""
    model = placed(opened("fsdp"), Blocks)
    assert isinstance(model, Blocks)
    with torch.no_grad():
        return list(model.encode(micro(0, 0)[0]).shape)


def test_methods_work_without_gradients(two: RankPool) -> None:
    """An evaluation may begin with another method than forward."""
    assert two.run(_lazily) == [[4, WIDTH]] * 2


def _dtypes(precision: str) -> set[torch.dtype]:
    strategy = opened("fsdp", precision)
    made = Fit(strategy, placed(strategy, Blocks))
    made.micro(0, strategy.rank, last=True)
    grads = gradients(made.model.parameters())
    assert all(isinstance(grad, DTensor) for grad in grads)
    return {grad.dtype for grad in grads}


@pytest.mark.parametrize(("precision", "dtype"), [("fp64", torch.float64), ("bf16", torch.float32)])
def test_gradients_are_reduced_in_the_parameters_dtype(precision: str, dtype: torch.dtype, two: RankPool) -> None:
    """float64 stays float64 on its way; low precision is summed in float32."""
    assert two.run(_dtypes, precision) == [{dtype}] * 2


def _units() -> list[int]:
    strategy = opened("fsdp")
    wanted: list[tuple[Any, dict[str, Any]]] = [
        (Blocks, {}), (Blocks, {"wrap": ()}), (Blocks, {"wrap": (Block,)}), (TiedToBlock, {}), (TiedBlocks, {}),
    ]  # fmt: skip
    return [strategy._entries[placed(strategy, build, **options)]._units for build, options in wanted]  # type: ignore[attr-defined]


def test_units(two: RankPool) -> None:
    """Blocks are units; one that shares a parameter with what is outside of it is not, since that would cut the tie."""
    assert two.run(_units) == [[3, 1, 3, 2, 1]] * 2


def _normalised() -> tuple[bool, float]:
    strategy = opened("fsdp", "bf16")
    made = Fit(strategy, placed(strategy, NormBlocks))
    for index in range(2):
        made.step(index)
    return all(value.dtype is not torch.bfloat16 for value in made.model.buffers()), made.losses[-1]


def test_batch_normalisation_stays_in_float32(two: RankPool) -> None:
    """Low precision leaves its weights and statistics alone, inside of blocks too."""
    first, second = two.run(_normalised)
    assert first == second
    assert first[0]
    assert first[1] == pytest.approx(1.1, abs=0.4)


def _mixed_norm() -> tuple[float, float, list[float]]:
    """Shards, some of them empty, next to whole gradients."""
    strategy, other = opened("fsdp"), opened("ddp")
    made = [Fit(each, placed(each, Disordered)) for each in (strategy, other)]
    for fit in made:
        fit.micro(0, strategy.rank, last=True)
    grads = [grad for fit in made for grad in gradients(fit.model.parameters())]
    wanted = torch.stack([full(grad).norm() for grad in grads]).norm()
    found = norm(grads, strategy.device)
    scale_(grads, torch.tensor(0.5))
    half = norm(grads, strategy.device)
    return float(wanted), float(found), [float(half)]


def test_the_norm_over_shards_and_whole_gradients(three: RankPool) -> None:
    """Every element counts once, whatever it is laid over, and scaling halves it."""
    for wanted, found, (half,) in three.run(_mixed_norm):
        assert found == pytest.approx(wanted, rel=1e-12)
        assert half == pytest.approx(wanted / 2, rel=1e-12)


def _offload() -> str:
    return attempt(lambda: placed(opened("fsdp"), Blocks, offload=True))


def test_offloading_from_the_host_is_refused(two: RankPool) -> None:
    """Shards that are in host memory already cannot be kept there."""
    assert all("there already" in said for said in two.run(_offload))


def _whole() -> list[str]:
    strategy = opened("fsdp")
    model = placed(strategy, Disordered)
    bare = Disordered().state_dict()
    state = strategy.whole(model)
    return [name for name in bare if state[name].shape != bare[name].shape] + sorted(state.keys() ^ bare.keys())


def test_the_whole_state_has_the_bare_models_names_and_shapes(three: RankPool) -> None:
    """Every rank gets every tensor whole, under the bare model's names (B059, B061)."""
    assert three.run(_whole) == [[]] * 3
