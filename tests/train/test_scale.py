"""The loss scale of fp16."""

from __future__ import annotations

from worldsize.train.scale import LossScale


def test_it_doubles_after_good_steps_and_halves_after_an_overflow() -> None:
    """An overflow begins the count anew; it never falls below one."""
    scale = LossScale(4.0, interval=2)
    assert [scale.judge(finite=finite) for finite in (True, True, True, False, True)] == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert (scale.value, scale.good) == (4.0, 1)
    for _ in range(9):
        scale.judge(finite=False)
    assert scale.value == 1.0


def test_it_goes_on_where_it_was() -> None:
    """Count included."""
    one, two = LossScale(8.0, interval=3), LossScale(interval=3)
    one.judge(finite=True)
    two.load_state_dict(one.state_dict())
    assert (two.value, two.good) == (8.0, 1)
