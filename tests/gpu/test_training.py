"""What one training is on one, two and four GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.gpu.battery import HALF, STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.gpu.conftest import Batteries

SEVERAL = [pytest.param(2, marks=pytest.mark.gpu(count=2)), pytest.param(4, marks=pytest.mark.gpu(count=4))]
TWO = pytest.mark.gpu(count=2)
STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


def difference(one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> float:
    """The largest relative difference over the steps that `other` made."""
    assert other[what]
    return max(float(abs(one[what][step] - value) / abs(one[what][step])) for step, value in other[what].items())


@STRATEGIES
@pytest.mark.parametrize("ranks", SEVERAL)
@pytest.mark.parametrize("what", ["loss", "norm", "lr"])
def test_float32_curve_is_that_of_one_gpu(batteries: Batteries, ranks: int, strategy: str, what: str) -> None:
    """Losses, gradient norms and learning rates of 20 steps in float32 are those of one GPU, within 1e-5."""
    seen = batteries.seen(ranks, f"{strategy}-fp32")
    assert len(seen["loss"]) == STEPS
    assert difference(batteries.seen(1, "single-fp32"), seen, what) < 1e-5


@TWO
@STRATEGIES
def test_float64_curve_is_that_of_one_gpu(batteries: Batteries, strategy: str) -> None:
    """Losses of 20 steps in float64 are those of one GPU, within 1e-10."""
    seen = batteries.seen(2, f"{strategy}-fp64")
    assert difference(batteries.seen(1, "single-fp64"), seen, "loss") < 1e-10


@TWO
@STRATEGIES
def test_the_same_layout_twice_is_equal_bit_for_bit(batteries: Batteries, strategy: str) -> None:
    """With deterministic algorithms two runs of one layout end with equal losses and weights, to the last bit."""
    seen = batteries.seen(2, f"{strategy}-twice")
    assert seen["one"] == seen["two"]


@TWO
@STRATEGIES
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(batteries: Batteries, strategy: str, precision: str) -> None:
    """In bf16 and in fp16 with a loss scale the loss falls as it does in float32."""
    losses = batteries.seen(2, f"{strategy}-{precision}")["loss"]
    in_float32 = batteries.seen(2, f"{strategy}-fp32")["loss"]
    first, last = str(0), str(STEPS - 1)
    assert losses[last] < 0.5 * losses[first]
    assert losses[last] == pytest.approx(in_float32[last], rel=0.2, abs=0.05)


@TWO
@STRATEGIES
def test_compiled_is_the_same_training(batteries: Batteries, strategy: str) -> None:
    """With compile=True losses stay those of the eager model, as far as other kernels round alike."""
    eager, compiled = (batteries.seen(2, f"{strategy}-{what}") for what in ("fp32", "compiled"))
    assert difference(eager, compiled, "loss") < 2e-3


@TWO
def test_offloaded_is_the_same_training(batteries: Batteries) -> None:
    """Shards and optimizer in host memory change where numbers are, not the curve."""
    plain, offloaded = (batteries.seen(2, f"fsdp-{what}") for what in ("fp32", "offloaded"))
    assert offloaded["device"] == "cpu"
    assert difference(plain, offloaded, "loss") < 1e-5


def goes_on(batteries: Batteries, ranks: int, case: str) -> None:
    """The case made the rest of the steps, as a run on one GPU that nobody disturbed makes them."""
    seen = batteries.seen(ranks, case)
    assert [int(step) for step in seen["loss"]] == list(range(HALF, STEPS))
    assert difference(batteries.seen(1, "single-fp32"), seen, "loss") < 1e-5
    assert difference(batteries.seen(1, "single-fp32"), seen, "lr") < 1e-12


@TWO
def test_what_two_gpus_saved_one_goes_on_with(batteries: Batteries) -> None:
    """Saved in the background by fsdp on 2 GPUs, resumed by one GPU: the steps that follow are those of a straight run."""
    goes_on(batteries, 1, "single-resume")


@TWO
@pytest.mark.parametrize("case", ["ddp-to-fsdp", "fsdp-to-ddp", "fsdp-offloaded-to-ddp"])
def test_a_run_changes_its_strategy(batteries: Batteries, case: str) -> None:
    """What one strategy saved in the background another one goes on with, on the same GPUs."""
    goes_on(batteries, 2, case)


@pytest.mark.gpu(count=4)
@STRATEGIES
def test_what_two_gpus_saved_four_go_on_with(batteries: Batteries, strategy: str) -> None:
    """Saved on 2 GPUs by one strategy, resumed on 4 by the other one."""
    goes_on(batteries, 4, f"{strategy}-resume")


@TWO
@STRATEGIES
def test_every_training_ran_on_a_gpu(batteries: Batteries, strategy: str) -> None:
    """Nothing of the above was shown on the CPU; its averaged weights have learnt the classes."""
    seen = batteries.seen(2, f"{strategy}-fp32")
    assert seen["device"] == "cuda:0"
    assert seen["averaged"] > 0.5
