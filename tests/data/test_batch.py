"""What the arithmetic of batches promises."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.config import Duration
from worldsize.data.batch import BatchPlan, deal, ledger, total_steps
from worldsize.errors import ConfigError, DataError


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    """Any plan that can be made."""
    size = draw(st.integers(1, 60))
    drop = draw(st.booleans())
    length = draw(st.integers(size if drop else 1, 400))
    return BatchPlan(length, size, draw(st.integers(1, size)), drop)


@given(plans(), st.integers(0, 3), st.integers(1, 7))
def test_an_epoch_sees_every_sample_once(plan: BatchPlan, epoch: int, ranks: int) -> None:
    """For any length, global batch, micro-batch and ranks, shares of an epoch put together are each position once."""
    seen: list[int] = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        micro = plan.micro(plan.step(step))
        for first, last in deal(len(micro), ranks):
            seen += chain.from_iterable(range(*cut) for cut in micro[first:last])
    assert seen == list(range(plan.samples_per_epoch))
    assert plan.length is not None
    assert plan.length - len(seen) < plan.global_batch
    assert plan.drop_last or len(seen) == plan.length


@given(plans(), st.integers(0, 200))
def test_steps_follow_one_another(plan: BatchPlan, step: int) -> None:
    """samples_before grows by the size of each step; only an epoch's last step is short, and only it ends the epoch."""
    piece, after = plan.step(step), plan.step(step + 1)
    assert plan.samples_before(step + 1) - plan.samples_before(step) == piece.samples
    assert piece.ends_epoch == (after.epoch == piece.epoch + 1) == (after.start == 0)
    assert piece.ends_epoch or piece.samples == plan.global_batch
    assert all(stop - start == plan.micro_batch for start, stop in plan.micro(piece)[:-1])


@given(st.integers(0, 1000), st.integers(1, 50))
def test_deal_is_contiguous_and_even(count: int, ranks: int) -> None:
    """Shares join up, cover everything, differ by at most one, and the larger come first."""
    shares = deal(count, ranks)
    assert shares[0][0] == 0
    assert shares[-1][1] == count
    assert all(one[1] == other[0] for one, other in pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_eight_on_three() -> None:
    """8 micro-batches on 3 ranks: 3, 3, 2."""
    assert deal(8, 3) == [(0, 3), (3, 6), (6, 8)]


@given(plans(), st.integers(0, 2000))
def test_samples_become_the_fewest_steps_that_reach_them(plan: BatchPlan, samples: int) -> None:
    """A duration in samples ends with the first step at or past it."""
    steps = total_steps(Duration(samples, "sa"), plan)
    assert plan.samples_before(steps) >= samples
    assert steps == 0 or plan.samples_before(steps - 1) < samples


def test_durations_of_a_known_length() -> None:
    """Steps are steps; epochs are whole epochs, short steps counted."""
    plan = BatchPlan(100, 32, 8)
    assert total_steps(Duration.parse("7st"), plan) == 7
    assert total_steps(Duration.parse("3ep"), plan) == 12
    assert total_steps(Duration.parse("3ep"), BatchPlan(100, 32, 8, drop_last=True)) == 9


def test_durations_without_a_total() -> None:
    """Epochs of unknown length and tokens say why they have no total."""
    with pytest.raises(DataError, match=r"'10ep' of unknown length has no total.*use steps or tokens"):
        total_steps(Duration.parse("10ep"), BatchPlan(None, 4, 2))
    with pytest.raises(DataError, match=r"'2000tok' has no total.*counted as they are read"):
        total_steps(Duration.parse("2ktok"), BatchPlan(None, 4, 2))
    assert total_steps(Duration.parse("10sa"), BatchPlan(None, 4, 2)) == 3


def test_unknown_length_is_one_endless_epoch() -> None:
    """Without a length, steps are planned on and on; what needs a length says so."""
    plan = BatchPlan(None, 4, 2)
    assert plan.step(3).start == plan.samples_before(3) == 12
    with pytest.raises(DataError, match="length of the data is not known"):
        plan.steps_per_epoch  # noqa: B018 - the property raises
    with pytest.raises(DataError, match="needs an order"):
        list(ledger(plan, 0, 0, 1))


def test_an_empty_dataset_is_refused() -> None:
    """B080: no samples is always an error."""
    with pytest.raises(DataError, match=r"empty.*0 samples"):
        BatchPlan(0, 8, 4)


def test_zero_steps_are_refused_with_the_numbers() -> None:
    """B080: 3 samples under drop_last with a global batch of 8 would be an epoch of no steps."""
    with pytest.raises(DataError, match="3 samples, global_batch 8, micro_batch 4"):
        BatchPlan(3, 8, 4, drop_last=True)


def test_fewer_samples_than_a_batch_are_one_short_step() -> None:
    """B080: without drop_last the whole dataset is one exact step, and the plan has a sentence that says so."""
    plan = BatchPlan(3, 8, 2)
    assert (plan.steps_per_epoch, plan.micro(plan.step(5))) == (1, [(0, 2), (2, 3)])
    assert plan.short == "3 samples do not fill a global batch of 8: every step is that short"
    assert BatchPlan(8, 8, 2).short is None


@pytest.mark.parametrize(("global_batch", "micro_batch"), [(4, 8), (0, 0), (4, 0)])
def test_impossible_batches_are_refused(global_batch: int, micro_batch: int) -> None:
    """A micro-batch lies between 1 and the global batch."""
    with pytest.raises(ConfigError, match=f"global_batch {global_batch}, micro_batch {micro_batch}"):
        BatchPlan(100, global_batch, micro_batch)


@given(plans(), st.integers(0, 9), st.data())
def test_the_ledger_from_any_step_is_the_rest_of_the_whole(plan: BatchPlan, seed: int, data: st.DataObject) -> None:
    """B053: for every k, the ids from step k on are those of the undisturbed run; each epoch holds each sample once."""
    stop = 2 * plan.steps_per_epoch
    whole = list(ledger(plan, seed, 0, stop))
    k = data.draw(st.integers(0, stop))
    assert list(ledger(plan, seed, k, stop)) == whole[k:]
    for epoch in (0, 1):
        ids = [each for _, at, step in whole for each in step if at == epoch]
        assert len(ids) == len(set(ids)) == plan.samples_per_epoch


def test_the_tutorial_position() -> None:
    """B053: 100 samples by 4: step 15 is the 16th batch of epoch 0, step 25 the first of epoch 1."""
    plan = BatchPlan(100, 4, 4)
    assert (plan.step(15).epoch, plan.step(15).start) == (0, 60)
    assert (plan.step(25).epoch, plan.step(25).start) == (1, 0)


def test_pure_modules_do_not_import_torch() -> None:
    """The launch half and the tools use keys, order and batch without torch; the package itself loads nothing."""
    code = (
        "import sys, worldsize.data; assert 'numpy' not in sys.modules;"
        "import worldsize.data.batch, worldsize.runtime.keys; assert 'numpy' not in sys.modules;"
        "import worldsize.data.order; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
