"""What a loss means, and every sentence that refuses one."""

from __future__ import annotations

import pytest
import torch

from worldsize.errors import StepError
from worldsize.train.losses import counted, read, separable


def test_unreduced_losses_are_summed() -> None:
    """One number for each counted item, in any shape."""
    part = read(torch.ones(2, 3), None, None, None, 6)
    assert float(part.losses.sum()) == 6
    assert part.explicit is None
    assert not part.divided


@pytest.mark.parametrize("count", [1, 8])
def test_a_bare_number_is_refused_in_words(count: float) -> None:
    """Also where the micro-batch has one sample: tomorrow it has two."""
    with pytest.raises(StepError, match=r"got one number: a mean or a sum, over how many\?.*mean_over= / sum_over="):
        read(torch.tensor(0.5), None, None, None, count)


def test_losses_of_padding_are_refused_with_both_numbers() -> None:
    """API 4: the padding was counted as if it were text."""
    with pytest.raises(StepError, match=r"4,096 losses for 3,871 counted items.*mask the padding"):
        read(torch.zeros(4, 1024), None, None, None, 3871)


def test_a_mean_counts_for_what_it_is_over() -> None:
    """A mean of 2 over 5 items weighs as 10 over 5."""
    part = read(torch.tensor(2.0), 5, None, None, 8)
    assert (float(part.losses.sum()), part.explicit) == (10.0, 5.0)


def test_a_sum_counts_for_what_it_is_over() -> None:
    """A number of shape (1,) is one number too."""
    part = read(torch.tensor([2.0]), None, 5, None, 8)
    assert (float(part.losses.sum()), part.explicit) == (2.0, 5.0)


def test_a_sum_over_nothing_is_nothing() -> None:
    """B071: a micro-batch in which every label is masked has weight 0."""
    part = read(torch.tensor(0.0), None, 0, None, 8)
    assert (float(part.losses.sum()), part.explicit) == (0.0, 0.0)


def test_a_mean_over_nothing_is_refused() -> None:
    """B071: it is NaN, and NaN times 0 is NaN."""
    with pytest.raises(StepError, match=r"mean over no items is NaN.*sum_over="):
        read(torch.tensor(float("nan")), 0, None, None, 8)


@pytest.mark.parametrize(
    ("losses", "mean_over", "sum_over"), [(None, None, None), (torch.tensor(1.0), 2, 2), (None, 3, None)]
)
def test_contradicting_or_missing_arguments_are_refused(
    losses: torch.Tensor | None, mean_over: float | None, sum_over: float | None
) -> None:
    """Either losses, or one number with what it is over."""
    with pytest.raises(StepError, match="either mean_over= or sum_over="):
        read(losses, mean_over, sum_over, None, 8)


def test_mean_over_goes_with_one_number() -> None:
    """Eight losses are no mean."""
    with pytest.raises(StepError, match=r"go with one number.*\(8,\)"):
        read(torch.ones(8), 8, None, None, 8)


def test_a_share_stands_alone() -> None:
    """It is divided already."""
    assert read(None, None, None, torch.tensor(0.1), 8).divided
    with pytest.raises(StepError, match="share= stands alone"):
        read(torch.ones(8), None, None, torch.tensor(0.1), 8)


def test_the_count_is_samples_unless_another_was_counted() -> None:
    """One name needs no `of=`, several do."""
    assert counted({}, 8, None) == 8
    assert counted({"tokens": 30.0}, 8, None) == 30
    assert counted({"tokens": 30.0}, 8, "samples") == 8
    assert counted({"tokens": 30.0, "words": 9.0}, 8, "words") == 9


@pytest.mark.parametrize("of", [None, "letters"])
def test_several_counts_need_a_name_that_is_counted(of: str | None) -> None:
    """The error lists them."""
    with pytest.raises(StepError, match=r"which count.*\['tokens', 'words'\]"):
        counted({"tokens": 30.0, "words": 9.0}, 8, of)


def test_a_probe_tells_a_mean_from_a_sum() -> None:
    """From the loss of all samples against that of two unequal parts."""
    output, target = torch.arange(7.0), torch.zeros(7)
    assert separable(torch.nn.MSELoss(), output, target) == "mean"
    assert separable(torch.nn.MSELoss(reduction="sum"), output, target) == "sum"
    assert separable(lambda o, _: o.max() - o.min(), output, target) == "neither"
