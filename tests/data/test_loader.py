"""What the loader promises for datasets with random access, in one process."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from tests.data.samples import Noisy, Numbers, joined, loader, told
from worldsize.data.batch import BatchPlan, ledger
from worldsize.data.feed import Share
from worldsize.errors import DataError
from worldsize.runtime.keys import key

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.data.loader import Loader


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    """A small plan."""
    size = draw(st.integers(1, 12))
    drop = draw(st.booleans())
    return BatchPlan(draw(st.integers(size if drop else 1, 40)), size, draw(st.integers(1, size)), drop)


def shared(plan: BatchPlan, ranks: int, stop: int, **settings: Any) -> list[Any]:
    """All ranks' steps of a noisy dataset, put together."""
    dataset = Noisy(plan.length or 0)
    shares = [loader(dataset, plan, rank=rank, ranks=ranks, **settings).steps(0, stop) for rank in range(ranks)]
    return joined([told(steps) for steps in shares])


@given(plans(), st.integers(2, 5), st.sampled_from(["none", "one", "equal"]))
@settings(max_examples=40, deadline=None)
def test_ranks_decide_nothing(plan: BatchPlan, ranks: int, padding: str) -> None:
    """For any plan, ranks and padding: the same samples with the same draws in the same micro-batches as on one rank."""
    stop = 2 * plan.steps_per_epoch
    assert shared(plan, ranks, stop, padding=padding) == shared(plan, 1, stop)


@given(plans(), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_what_is_delivered_is_what_the_ledger_says(plan: BatchPlan, seed: int) -> None:
    """The ids of each step, and the numbers in its batches, are those that the order alone gives."""
    stop = 2 * plan.steps_per_epoch
    steps = told(loader(Numbers(plan.length or 0), plan, seed=seed).steps(0, stop))
    assert [(piece.step, piece.epoch, [n for m in micro for n in m[1]]) for piece, _, _, micro in steps] == list(
        ledger(plan, seed, 0, stop)
    )
    assert all(ids == batch for _, _, _, micro in steps for _, ids, batch, _, _ in micro)


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_any_step(workers: int) -> None:
    """B053: for every k, steps from k on equal the rest of the undisturbed run, random draws included."""
    plan = BatchPlan(22, 6, 2)
    serving = loader(Noisy(22), plan, workers=workers)
    whole = told(serving.steps(0, 10))
    for k in range(11):
        assert told(serving.steps(k, 10)) == whole[k:]
    serving.close()


def test_workers_decide_nothing() -> None:
    """B075: without workers and with two the samples draw the same; over two epochs all draws differ, in each library."""
    plan = BatchPlan(30, 8, 3)
    one, other = (told(loader(Noisy(30), plan, workers=workers).steps(0, 8)) for workers in (0, 2))
    assert one == other
    rows = np.array([row for _, _, _, micro in one for m in micro for row in m[2]])
    for column in (1, 2, 3):
        assert len(set(rows[:, column])) == len(rows) == 60


def test_a_sample_is_seeded_by_its_key() -> None:
    """API.md 10: the draws of sample i in epoch e are the first ones after seeding with key(seed, "sample", e, i)."""
    ((_, _, _, (micro, *_)),) = told(loader(Noisy(10), BatchPlan(10, 10, 5), seed=7).steps(1, 2))
    index = micro[1][2]
    torch.default_generator.manual_seed(key(7, "sample", 1, index))
    assert micro[2][2][:2] == [index, torch.rand((), dtype=torch.float64).item()]
    random.seed(key(7, "sample", 1, index))
    assert micro[2][2][2] == random.random()


class Seldom(Noisy):
    """Draws only for sample 5, which no probe of a seed below sees."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return (
            super().__getitem__(index) if index == 5 else torch.tensor([float(index), 0, 0, 0], dtype=torch.float64)
        )


def test_a_dataset_that_seldom_draws_is_seeded_too() -> None:
    """A draw that the probes did not see is still keyed by its own sample, whatever was in the batch before it."""
    plan = BatchPlan(40, 8, 8)
    serving = loader(Seldom(40), plan)
    steps = told(serving.steps(0, 5))
    (row,) = [row for _, _, _, micro in steps for m in micro for row in m[2] if row[0] == 5]
    torch.default_generator.manual_seed(key(1, "sample", 0, 5))
    assert row[1] == torch.rand((), dtype=torch.float64).item()


def test_collate_is_seeded_by_step_and_micro_batch() -> None:
    """API.md 10: collate draws under key(seed, "collate", step, micro)."""
    source = torch.utils.data.DataLoader(Numbers(8), batch_size=2, shuffle=True, collate_fn=lambda _: torch.rand(1))
    steps = list(loader(source, BatchPlan(8, 4, 2), seed=3).steps(0, 2))
    torch.default_generator.manual_seed(key(3, "collate", 1, 1))
    assert steps[1].micro[1].batch == torch.rand(1)


class Own(Numbers):
    """Draws from a generator of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(np.random.default_rng().random())


@pytest.mark.parametrize("workers", [0, 1])
def test_own_generators_are_found(workers: int) -> None:
    """A dataset with a generator of its own is refused before the first step, unless that is accepted."""
    plan = BatchPlan(20, 4, 2)
    with pytest.raises(
        DataError, match=r"dataset\[\d+\] differs under the same key: it draws from its own generator"
    ):
        loader(Own(20), plan, workers=workers).steps(0, 1)
    accepted = loader(Own(20), plan, workers=workers, accept=["own-generator"])
    assert len(list(accepted.steps(0, 2))) == 2
    assert accepted.fingerprint()["digest"] is None


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from(["none", "one", "equal"]))
def test_padding_gives_what_was_asked(count: int, ranks: int, padding: str) -> None:
    """No padding adds nothing, "one" fills up to one, "equal" to the busiest; real shares cover everything once."""
    shares = [Share(rank, ranks, padding).of(count) for rank in range(ranks)]
    assert [number for real, _ in shares for number in real] == list(range(count))
    most = max(len(real) for real, _ in shares)
    least = {"none": 0, "one": 1, "equal": most}[padding]
    assert [len(real) + dummies for real, dummies in shares] == [max(len(real), least) for real, _ in shares]


def test_dummies_repeat_the_first_micro_batch() -> None:
    """A dummy is the step's micro-batch 0, marked, without a count; totals leave it out."""
    plan = BatchPlan(9, 3, 2)
    one, equal, none = (
        told(loader(Noisy(9), plan, rank=2, ranks=3, padding=padding, count=len).steps(0, 1))[0][3]
        for padding in ("one", "equal", "none")
    )
    first = told(loader(Noisy(9), plan).steps(0, 1))[0][3][0]
    assert one == equal == [(0, first[1], first[2], one[0][3], True)]
    assert none == []


def test_equal_padding_repeats_for_the_ragged_step() -> None:
    """With 5 micro-batches on 2 ranks the second rank gets 2 and one dummy."""
    (step,) = loader(Numbers(10), BatchPlan(10, 10, 2), rank=1, ranks=2, padding="equal").steps(0, 1)
    assert [(micro.index, micro.dummy) for micro in step.micro] == [(3, False), (4, False), (0, True)]
    assert step.micro_total == 5


def test_a_rank_that_never_has_work_goes_along() -> None:
    """Three ranks for two micro-batches without padding: the third sees every step, empty, and no end comes early."""
    steps = list(islice(loader(Numbers(6), BatchPlan(6, 2, 1), rank=2, ranks=3, workers=1).steps(0, None), 7))
    assert [step.micro for step in steps] == [[]] * 7
    assert steps[2].piece.ends_epoch


def test_steps_start_anywhere_at_once() -> None:
    """Step 10**9 of a dataset of 10**12 samples comes within a fraction of a second."""
    plan = BatchPlan(10**12, 256, 32)
    serving = loader(Numbers(10**12), plan)
    begun = time.perf_counter()
    step = next(serving.steps(10**9, None))
    assert time.perf_counter() - begun < 0.5
    assert step.piece.start == 256 * 10**9


def test_counts_are_named_and_added() -> None:
    """A bare number is called "count"; several come by name; "samples" is always there."""
    plan = BatchPlan(10, 6, 3)
    steps = list(loader(Numbers(10), plan, count=lambda batch: batch.sum()).steps(0, 2))
    assert steps[0].micro[0].count == {"count": float(sum(steps[0].micro[0].ids))}
    assert sum(step.totals["count"] for step in steps) == 45
    both = next(loader(Numbers(10), plan, count=lambda b: {"b": 1, "a": len(b)}).steps(0, 1))
    assert both.totals == {"samples": 6, "a": 6, "b": 2}


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), {"samples": 3}])
def test_wrong_counts_are_refused(wrong: Any) -> None:
    """A count is a finite number of 0 or more, and leaves the name "samples" alone."""
    with pytest.raises(DataError, match="count= must give numbers of 0 or more"):
        next(loader(Numbers(4), BatchPlan(4, 2, 2), count=lambda _: wrong).steps(0, 1))


def test_count_names_stay_the_same() -> None:
    """A count that changes its names is named with both."""
    counting = loader(Numbers(8), BatchPlan(8, 4, 4), shuffle=False, count=lambda b: {f"n{int(b[0])}": 1})
    with pytest.raises(DataError, match=r"other names at step 1 than before. Found: \['n4'\], before \['n0'\]"):
        list(counting.steps(0, 2))


class Broken(Numbers):
    """Raises for sample 5, which no probe sees."""

    def __init__(self, length: int, error: Exception) -> None:
        super().__init__(length)
        self._error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise self._error
        return super().__getitem__(index)


class TwoArgumentsError(Exception):
    """Does not survive pickling."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_users_exception_arrives(workers: int) -> None:
    """Type and message of the dataset's exception stay; a note has file:line, step and samples."""
    source = Broken(8, KeyError("label"))
    with pytest.raises(KeyError, match="label") as caught:
        list(loader(source, BatchPlan(8, 4, 2), workers=workers, shuffle=False).steps(0, 2))
    (note,) = caught.value.__notes__
    assert "test_loader.py:" in note
    assert note.endswith("step 1, micro-batch 0, samples [4, 5]")


def test_an_exception_that_cannot_travel_is_told() -> None:
    """An exception that cannot be pickled arrives as a DataError with its type, message and place."""
    with pytest.raises(DataError, match=r"TwoArgumentsError: 1 and 2. Found: .*test_loader.py:\d+, step 1"):
        list(loader(Broken(8, TwoArgumentsError(1, 2)), BatchPlan(8, 4, 2), workers=1, shuffle=False).steps(0, 2))


def test_stop_iteration_in_a_dataset_does_not_end_training() -> None:
    """A dataset that raises StopIteration would silently end a plain loop; here it is an error."""
    with pytest.raises(DataError, match="the dataset raised StopIteration"):
        list(loader(Broken(8, StopIteration()), BatchPlan(8, 4, 2), shuffle=False).steps(0, 2))


def test_cuda_in_a_worker_is_told() -> None:
    """B073: torch's text about forked subprocesses becomes what to do."""
    source = Broken(8, RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with …"))
    with pytest.raises(DataError, match="dataset/collate must return CPU tensors"):
        list(loader(source, BatchPlan(8, 4, 2), workers=1, shuffle=False).steps(0, 2))


class Deadly(Numbers):
    """Ends its process at sample 5."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and torch.utils.data.get_worker_info() is not None:
            import os

            os._exit(9)
        return super().__getitem__(index)


def test_a_dead_worker_is_told() -> None:
    """A worker that vanishes is said to have died, with what to look for; the end of another child does not tell it again."""
    with pytest.raises(DataError, match=r"a data worker died.*try fewer workers"):
        list(loader(Deadly(8), BatchPlan(8, 4, 2), workers=1, shuffle=False).steps(0, 2))
    subprocess.run(["true"], check=True)


def test_fingerprints_tell_data_apart() -> None:
    """Equal data have equal fingerprints under any workers; another length, content or type has another."""

    def of(dataset: Dataset[Any], **settings: Any) -> dict[str, Any]:
        length = len(dataset)  # type: ignore[arg-type]
        return loader(dataset, BatchPlan(length, 4, 2), **settings).fingerprint()

    assert of(Noisy(20)) == of(Noisy(20), workers=1)
    assert len({str(of(each)) for each in (Noisy(20), Noisy(21), Numbers(20), TensorDataset(torch.ones(20)))}) == 4
    assert of(Numbers(20))["types"] == "float64[]"


def test_the_plan_must_fit_the_data() -> None:
    """A plan for another length is refused with both."""
    with pytest.raises(DataError, match="20 samples, planned 19"):
        loader(Numbers(20), BatchPlan(19, 4, 2))


def test_tensor_datasets_are_cut_whole() -> None:
    """A TensorDataset, also inside a Subset, gives what sample by sample and collate would give."""
    data = TensorDataset(torch.arange(20.0), torch.arange(20))
    plain = list(loader(data, BatchPlan(20, 8, 4)).steps(0, 3))
    slow = list(loader([data[index] for index in range(20)], BatchPlan(20, 8, 4)).steps(0, 3))
    for one, other in zip(plain, slow, strict=True):
        for a, b in zip(one.micro, other.micro, strict=True):
            assert type(a.batch) is type(b.batch) is list
            assert all(map(torch.equal, a.batch, b.batch))
    part = Subset(data, [19, 3, 7])
    (step,) = loader(part, BatchPlan(3, 3, 3), shuffle=False).steps(0, 1)
    assert step.micro[0].batch[1].tolist() == [19, 3, 7]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
LAID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor, "turned": lambda tensor: tensor.t().contiguous().t(),
    "trained": lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() and tensor.itemsize > 1 else tensor,
    "conjugate": lambda tensor: tensor.conj(),
}  # fmt: skip


@pytest.mark.parametrize("laid", list(LAID))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_kind_are_cut(dtype: torch.dtype, laid: str) -> None:
    """For any dtype, in any order of memory: the rows that torch's own indexing gives, bit for bit."""
    table = LAID[laid]((torch.arange(60).view(20, 3) % 7).to(dtype))
    (step,) = loader(TensorDataset(table), BatchPlan(20, 20, 20), shuffle=True).steps(0, 1)
    found, wanted = step.micro[0].batch[0], table[torch.tensor(step.micro[0].ids)]
    assert found.dtype is dtype
    assert torch.equal(
        found.resolve_conj().contiguous().view(torch.uint8), wanted.resolve_conj().contiguous().view(torch.uint8)
    )


ALONE = """
import os, numpy, torch
from torch.utils.data import TensorDataset
from tests.data.samples import loader
from worldsize.data.batch import BatchPlan
torch.set_num_threads(4)
steps = loader(TensorDataset(torch.from_numpy(numpy.ones((64, 20000)))), BatchPlan(64, 8, 8)).steps(0, 6)
next(steps)
before = len(os.listdir("/proc/self/task"))
list(steps)
print(len(os.listdir("/proc/self/task")) - before)
(torch.ones(4, 500000) + 1).sum()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_cutting_wakes_no_other_threads() -> None:
    """OpenMP's threads would stay awake beside the training for milliseconds after each batch."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    after_data, after_sum = map(int, done.stdout.split())
    assert after_data == 0
    assert after_sum > 0, "this torch has no threads to wake"


class Many(Numbers):
    """Gives samples several at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [(index, torch.rand(()).item()) for index in indices]


def test_getitems_is_used() -> None:
    """`__getitems__` is asked once for a micro-batch, under the key of its first sample."""
    (step,) = loader(Many(6), BatchPlan(6, 6, 3), shuffle=False).steps(0, 1)
    torch.default_generator.manual_seed(key(1, "sample", 0, 3))
    assert step.micro[1].batch[1].tolist() == pytest.approx([torch.rand(()).item() for _ in range(3)])


class Pair(NamedTuple):
    """A named sample."""

    x: torch.Tensor
    y: int


def test_batches_move_whole() -> None:
    """On the device, floating-point tensors have the type asked for, and nested structures keep theirs."""
    samples = [Pair(torch.tensor([1.0]), number) for number in range(4)]
    settings = {"device": torch.device("cpu"), "dtype_of_floats": torch.float64}
    (step,) = loader(samples, BatchPlan(4, 4, 4), **settings).steps(0, 1)
    batch = step.micro[0].batch
    assert isinstance(batch, Pair)
    assert batch.x.dtype is torch.float64
    assert torch.as_tensor(batch.y).dtype is torch.int64


def test_a_closed_loader_says_so() -> None:
    """After close there is nothing to iterate."""
    serving: Loader = loader(Numbers(4), BatchPlan(4, 2, 2))
    serving.close()
    with pytest.raises(DataError, match="closed"):
        next(serving.steps(0, 1))
